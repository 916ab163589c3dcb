"""Runs of the real training loop in which each rank records the tokens that each step is given."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

from data.config import SourceConfig
from health_runs import Plan, poison_samples
from launcher.config.tree import CheckpointConfig, MetricsConfig, RunConfig, WandbConfig
from launcher.training.run_dir import claim
from parallel.config import ParallelConfig
from parallel.processes.start import run_ranks


def one_source_run(config: RunConfig, folder: Path, name: str, degrees: dict[str, int], **data: Any) -> RunConfig:
    """The config for a run in FOLDER/NAME on the data FOLDER/a, with a checkpoint every two steps.

    ``degrees`` are those of ``parallel``; ``data``: further changes to keys of the data section.
    """
    return dataclasses.replace(
        config,
        name=name,
        run_dir=str(folder / name),
        parallel=ParallelConfig(zero=1, **degrees),
        data=dataclasses.replace(config.data, sources=(SourceConfig(path=str(folder / "a")),), **data),
        checkpoint=CheckpointConfig(every_steps=2),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )


def run_recorded(folder: Path, plan: Plan, config: Any, n_ranks: int, changed: Any = ()) -> list[Any]:
    """Starts the run on ``n_ranks`` ranks; returns their exit codes. Each rank appends to its own file in ``folder``.

    ``changed``: the changes to the run's config that the start makes, as ``check_resume`` returns them.
    """
    with claim(config):
        options = {"timeout_seconds": 240, "threads": 1, "preload": ["launcher.training.loop"]}
        return run_ranks(train_recorded, n_ranks, folder, plan, config, [*changed], **options)


def train_recorded(folder: Path, plan: Plan, config: Any, changed: Any = ()) -> Any:
    """One rank of ``run_recorded``: trains, and appends each step's rows of tokens to FOLDER/rank-N.jsonl."""
    import launcher.training.loop as loop
    import launcher.training.step as step

    poison_samples(plan)
    accumulate, read = loop.accumulate_gradients, step.read_micro_batch
    now = 0

    def accumulating(engine: Any, dataset: Any, indices: Any, size: int, stop: Any, drawn_from: Any) -> Any:
        nonlocal now
        now = drawn_from[1]
        with (folder / f"rank-{engine.mesh.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": now, "begins": True}) + "\n")
        return accumulate(engine, dataset, indices, size, stop, drawn_from)

    def reading(dataset: Any, indices: Any, mesh: Any, *rest: Any, **options: Any) -> Any:
        batch = read(dataset, indices, mesh, *rest, **options)
        rows = batch.tokens_BS.tolist()
        with (folder / f"rank-{mesh.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": now, "rows": rows}) + "\n")
        return batch

    loop.accumulate_gradients, step.read_micro_batch = accumulating, reading
    return loop.train(config, list(changed))


def tokens_of_steps(folder: Path) -> dict[int, Counter[int]]:
    """Step -> how often each token was given to any rank, without padding."""
    given: dict[int, Counter[int]] = {}
    for path in folder.glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            given.setdefault(row["step"], Counter()).update(t for tokens in row.get("rows", []) for t in tokens if t)
    return given


def given_rows(folder: Path) -> dict[int, list[list[int]]]:
    """Step -> the rows of tokens that all ranks were given when it was last executed, in no particular order."""
    given: dict[int, list[list[int]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        own: dict[int, list[list[int]]] = {}
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "begins" in row:
                own[row["step"]] = []
            else:
                own[row["step"]] += row["rows"]
        for step, rows in own.items():
            given.setdefault(step, []).extend(rows)
    return given
