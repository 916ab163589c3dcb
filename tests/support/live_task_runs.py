"""Runs of the real training loop that evaluate tasks on their weights while they train."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConfig, SourceConfig
from data.prepare import prepare
from launcher.config.tree import MetricsConfig, RunConfig, WandbConfig
from launcher.training.run_dir import claim
from launcher.watch.metrics import read_metrics
from layout_runs import MOE_MODEL, run_config
from parallel.config import ParallelConfig
from parallel.processes.start import run_ranks
from task_runs import write_tasks

VOCAB = 320
KINDS = ("pick", "bare", "roll")


def prepared_folder(folder: Path) -> Path:
    """Writes text, its token files and tasks into ``folder``; returns it."""
    draw = np.random.default_rng(0)
    (folder / "text").mkdir(parents=True)
    for number in range(40):
        text = "".join(draw.choice([*"abcdefgh {}0123."], int(draw.integers(20, 90))))
        (folder / "text" / f"{number:02}.txt").write_text(text)
    write_tasks(folder / "own", *KINDS, n=9)
    prepare(a_config(folder, "any").data, vocab_size=VOCAB)
    return folder


def a_config(folder: Path, name: str, *, zero: int = 1, tasks: bool = True, **degrees: int) -> RunConfig:
    """The config of a run of two updates on the folder's text; with ``tasks``, tasks are evaluated after each."""
    names = tuple(str(folder / "own" / f"{kind}.yaml") for kind in KINDS) if tasks else ()
    options: dict[str, Any] = {"eval_tasks": names, "eval_tasks_every_steps": 1 if tasks else None}
    config = run_config("", model=dataclasses.replace(MOE_MODEL, vocab_size=VOCAB), steps=2, **options)
    sources = (SourceConfig(path=str(folder / "text")),)
    return dataclasses.replace(
        config,
        name=name,
        run_dir=str(folder / name),
        parallel=ParallelConfig(zero=zero, **degrees),
        data=DataConfig(seq_len=32, sources=sources, token_dir=str(folder / "tokens")),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )


def trained(config: RunConfig, n_ranks: int, fault: str | None = None) -> list[dict[str, Any]]:
    """Trains on ``n_ranks`` processes; returns the rows of metrics.jsonl.

    The windows' answers of evaluation N are written to RUN/answers-N.npy, the likeliest tokens to RUN/best-N.npy.
    """
    options: dict[str, Any] = {"timeout_seconds": 240, "threads": 1, "preload": ["launcher.training.loop"]}
    with claim(config):
        assert run_ranks(train_noting, n_ranks, config, fault, **options) == [0] * n_ranks
    return read_metrics(Path(config.run_dir or "") / "metrics.jsonl")


def train_noting(config: RunConfig, fault: str | None) -> Any:
    """One rank of ``trained``, which records the answers of each evaluation.

    The fault "share" drops the scored targets of all ranks but 0.
    """
    import launcher.tasks.score as score
    import launcher.training.live_tasks as live
    import launcher.training.loop as loop

    own, number = live.score, 0

    def noting(*given: Any) -> Any:
        nonlocal number
        answers, number = own(*given), number + 1
        if answers is not None:
            found = [(answer.loglikelihood, answer.is_greedy) for answer in answers]
            np.save(Path(config.run_dir or "") / f"answers-{number}.npy", np.array(found))
        return answers

    def noting_best(*given: Any) -> Any:
        losses_and_best = put_together(*given)
        np.save(Path(config.run_dir or "") / f"best-{number + 1}.npy", losses_and_best[1])
        return losses_and_best

    live.score, put_together = noting, score.put_together
    score.put_together = noting_best
    if fault == "share":
        gathered = score.gathered
        score.gathered = lambda found, mesh: gathered(found if mesh.rank == 0 else [], mesh)
    return loop.train(config, [])


def answers_of(config: RunConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each evaluation: an array [windows, 2] of log-likelihood and is-greedy, and the likeliest tokens."""
    paths = [sorted(Path(config.run_dir or "").glob(f"{name}-*.npy")) for name in ("answers", "best")]
    return [(np.load(answers), np.load(best)) for answers, best in zip(*paths, strict=True)]
