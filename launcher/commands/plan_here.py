"""`roundtable plan CONFIG --as cpu`: the time of a training step by local processes on this machine's processor."""

import json
from collections.abc import Sequence
from pathlib import Path

from launcher.config.checked import load_checked
from launcher.config.tree import RunConfig
from launcher.console import say
from launcher.errors import UserError
from launcher.limits import check_local_ranks
from launcher.training.start import default_ranks


def plan_processor(
    path: Path, overrides: Sequence[str], machine: str, ranks: int | None, others: Sequence[str], *, as_json: bool
) -> int:
    """Prints the plan and returns the exit code. ``others``: options that were given, though they say nothing here.

    Raises UserError for another ``machine`` than cpu, for any of ``others``, or for a config that cannot be traced.
    """
    if machine != "cpu":
        raise UserError([f"--as={machine} must be cpu: this machine's processor; for a GPU give --gpu={machine}"])
    if others:
        verb = "does" if len(others) == 1 else "do"
        raise UserError([f"{' and '.join(others)} {verb} not go together with --as=cpu; leave out one or the other"])
    check_local_ranks(ranks)
    n_ranks = ranks or default_ranks()
    config = load_checked(path, overrides, world_size=n_ranks, data=False)
    check_traceable(config)
    from launcher.processor.plan import plan_here

    plan = plan_here(config, path, overrides, n_ranks)
    if plan is None:
        return 1
    if as_json:
        say(json.dumps(plan, indent=2))
    else:
        from launcher.processor.text import print_plan

        print_plan(plan)
    return 0


def check_traceable(config: RunConfig) -> None:
    """Raises UserError for precisions and compiled kernels whose speed is not measured on a processor."""
    if config.train.precision not in ("bf16", "fp32"):
        rule = "has no plan on a processor, whose rates are measured in bf16 and fp32"
        raise UserError([f"train.precision={config.train.precision} {rule}; try train.precision=bf16"])
    if config.train.compile == "on":
        raise UserError(["train.compile=on has no plan on a processor: compiled chains are not timed; try auto"])
