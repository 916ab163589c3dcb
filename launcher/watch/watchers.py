"""All outputs of a running training (metrics.jsonl, ledger, terminal, W&B) behind one object that the loop calls."""

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from launcher.config.tree import RunConfig
from launcher.guard.fence import Fence
from launcher.training.run_parts import LEDGER, METRICS
from launcher.watch.metrics import MetricsFile, plain_row
from launcher.watch.null_run import NullRun
from launcher.watch.terminal import View, open_view

if TYPE_CHECKING:
    from launcher.watch.wandb_run import WandbRun


class Watchers:
    """Passes each row to metrics.jsonl, the terminal and W&B, in this order; also writes the ledger. Rank 0 only."""

    def __init__(self, metrics: MetricsFile, ledger: MetricsFile, view: View, wandb_run: "WandbRun | NullRun") -> None:
        self.metrics = metrics
        self.ledger = ledger
        self.view = view
        self.wandb_run = wandb_run

    def update(self, row: Mapping[str, Any]) -> None:
        """Records one update's numbers: step, tokens, loss, lr, grad_norm, then speed and moe/... keys."""
        assert "loss" in row
        self._pass_on(row)

    def eval(self, row: Mapping[str, Any]) -> None:
        """Records one evaluation: step (of the last update before it), eval_loss, and no ``loss``."""
        assert "eval_loss" in row
        assert "loss" not in row
        self._pass_on(row)

    def event(self, row: Mapping[str, Any]) -> None:
        """Records an event: step, event (a short name) and further fields. "checkpoint" marks the last checkpoint."""
        assert "event" in row
        assert "loss" not in row
        assert "eval_loss" not in row
        self._pass_on(row)

    def consumed(self, row: Mapping[str, Any]) -> None:
        """Writes one step's row to ledger.jsonl alone."""
        self.ledger.write(row)

    def rewind(self, step: int) -> None:
        """Removes the rows of steps after ``step`` when a run rolls back; events stay, and so does what W&B has."""
        self.metrics.rewind(step)
        self.ledger.rewind(step)
        self.view.rewind(step)

    def sync(self) -> None:
        """Forces metrics.jsonl and ledger.jsonl to disk; called before a checkpoint is committed."""
        self.metrics.sync()
        self.ledger.sync()

    def close(self, exit_code: int = 0) -> None:
        """Closes all outputs, the terminal first, even where closing one of them fails. A second call does nothing."""
        with ExitStack() as stack:
            stack.callback(self.metrics.close)
            stack.callback(self.ledger.close)
            stack.callback(self.wandb_run.finish, exit_code)
            stack.callback(self.view.close)

    def _pass_on(self, row: Mapping[str, Any]) -> None:
        plain = plain_row(row)
        self.metrics.write(plain)
        self.view.update(plain)
        self.wandb_run.log(plain)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(exit_code=0 if kind is None else 1)


class NullWatchers:
    """The stand-in for ``Watchers`` on all ranks but 0: each call does nothing."""

    def update(self, row: Mapping[str, Any]) -> None:
        """Does nothing."""

    def eval(self, row: Mapping[str, Any]) -> None:
        """Does nothing."""

    def event(self, row: Mapping[str, Any]) -> None:
        """Does nothing."""

    def consumed(self, row: Mapping[str, Any]) -> None:
        """Does nothing."""

    def rewind(self, step: int) -> None:
        """Does nothing."""

    def sync(self) -> None:
        """Does nothing."""

    def close(self, exit_code: int = 0) -> None:
        """Does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_watchers(
    config: RunConfig,
    run_config: Mapping[str, Any],
    run_dir: Path,
    restored_step: int,
    rank: int,
    fence: Fence | None = None,
) -> Watchers | NullWatchers:
    """Opens the run's outputs on rank 0; on the other ranks a stand-in that does nothing.

    ``run_config`` is the config as nested dicts and this start's record, for W&B. ``restored_step`` is 0 for a fresh
    run; rows of metrics.jsonl and ledger.jsonl after it are removed. ``run_dir`` must exist. Rows are written only
    while ``fence`` confirms that no later start owns the run.
    Raises UserError where one of the files is damaged.
    """
    if rank != 0:
        return NullWatchers()
    guard = fence.held if fence is not None else nullcontext
    with ExitStack() as opened:  # closes again what was opened before a failure
        metrics = opened.enter_context(MetricsFile.resume(run_dir / METRICS, restored_step, guard))
        ledger = opened.enter_context(MetricsFile.resume(run_dir / LEDGER, restored_step, guard))
        train, every_steps = config.train, config.metrics.terminal_every_steps
        shown = (train.steps, restored_step + 1, config.name, run_dir, every_steps, train.batches)
        view = opened.enter_context(open_view(*shown))
        wandb_run: WandbRun | NullRun = NullRun()
        if config.metrics.wandb.mode != "disabled":
            from launcher.watch.wandb_run import open_wandb  # takes a second, which no other rank and run needs

            wandb_run = open_wandb(config.metrics.wandb, run_config, run_dir, config.name, announce=view.event)
        opened.pop_all()
    return Watchers(metrics, ledger, view, wandb_run)
