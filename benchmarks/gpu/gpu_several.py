"""Part 5: several GPUs over NCCL. Each layout against one process: losses, norms, the held-out loss, a saved state."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from data.dataset import open_dataset
from gpu_part import Check, Place
from gpu_report import Skipped
from gpu_whole import EVEN_DENSE, EVEN_MOE, plain_rows, small_run
from launcher.config.tree import RunConfig
from launcher.training.loop import build_engine, heldout_loss, prepare_process, run_step
from launcher.training.state import TrainState, restore, save
from parallel.checkpoint.retention import Retention
from parallel.config import ParallelConfig
from parallel.mesh import close_mesh, open_mesh
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB
from parallel.processes.start import run_ranks

BOUNDS = {"loss": 1e-5, "grad_norm": 1e-4}  # relative, fp32


class Layout(NamedTuple):
    """Axes, on so many GPUs at least."""

    name: str
    ranks: int
    parallel: ParallelConfig
    is_dense: bool = False


LAYOUTS = (
    Layout("dp 2, ZeRO 1", 2, ParallelConfig(zero=1)),
    Layout("dp 2, ZeRO 2", 2, ParallelConfig(zero=2)),
    Layout("dp 2, ZeRO 3", 2, ParallelConfig(zero=3)),
    Layout("tp 2", 2, ParallelConfig(tp=2)),
    Layout("tp 2, dense", 2, ParallelConfig(tp=2), is_dense=True),
    Layout("tp 2, overlap", 2, ParallelConfig(tp=2, tp_overlap=True)),
    Layout("tp 2, dense, overlap", 2, ParallelConfig(tp=2, tp_overlap=True), is_dense=True),
    Layout("ep 2", 2, ParallelConfig(ep=2)),
    Layout("ep 2, no overlap", 2, ParallelConfig(ep=2, ep_overlap=False)),
    Layout("ep 2, 2 chunks", 2, ParallelConfig(ep=2, ep_chunks=2)),
    Layout("tp 2, ep 2", 2, ParallelConfig(tp=2, ep=2)),
    Layout("cp 2, ulysses", 2, ParallelConfig(cp=2)),
    Layout("cp 2, ring", 2, ParallelConfig(cp=2, cp_attention="ring")),
    Layout("pp 2, 1f1b", 2, ParallelConfig(pp=2, pipeline=OneFOneB())),
    Layout("pp 2, interleaved", 2, ParallelConfig(pp=2, pipeline=Interleaved())),
    Layout("pp 2, zbv", 2, ParallelConfig(pp=2, pipeline=ZBV())),
    Layout("pp 2, dualpipev", 2, ParallelConfig(pp=2, pipeline=DualPipeV())),
    Layout("tp 2, cp 2, ep 4", 4, ParallelConfig(tp=2, cp=2, ep=4)),
    Layout("pp 2, ep 2, dp 2", 4, ParallelConfig(pp=2, ep=2)),
    Layout("tp 2, pp 2, ep 4, dp 2", 8, ParallelConfig(tp=2, pp=2, ep=4)),
)
IN_DRY_RUNS = ("dp 2, ZeRO 1", "tp 2", "pp 2, 1f1b")


def checks(n_devices: int, *, dry: bool) -> list[Check]:
    """A check for each layout."""
    layouts = [layout for layout in LAYOUTS if not dry or layout.name in IN_DRY_RUNS]
    return [Check(layout.name, partial(check_layout, layout), 90) for layout in layouts]


def check_layout(layout: Layout, place: Place) -> None:
    """Three steps, an evaluation, a save, a load into new weights, and the same held-out loss."""
    if not place.dry and place.n_devices < layout.ranks:
        raise Skipped(f"{layout.ranks} GPUs are needed, and there are {place.n_devices}")
    config = run_of(layout, place)
    rows, evaluated, again = run_ranks(layout_rank, layout.ranks, config, timeout_seconds=place.seconds(80))[0]
    assert evaluated == again, f"held-out loss {again} after a save and a load, {evaluated} before"
    assert math.isfinite(evaluated)
    compare_rows(rows, plain_rows(config, place.device))


def run_of(layout: Layout, place: Place) -> RunConfig:
    """The layout's run, of eight layers, which all schedules can deal out."""
    model = dataclasses.replace(EVEN_DENSE if layout.is_dense else EVEN_MOE, n_layers=place.small(8, 2))
    config = small_run(
        place, model, "fp32", layout.parallel.zero, steps=place.small(3, 2), eval_every_steps=2, eval_sequences=8
    )
    config = dataclasses.replace(config, parallel=layout.parallel)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=place.small(16, 8)))


def layout_rank(config: RunConfig) -> tuple[list[dict[str, Any]], float, float]:
    """In a rank: the steps' rows, and the held-out loss before a save and after a load."""
    prepare_process(config)
    mesh = open_mesh(config.parallel, 75)
    engine = build_engine(config, mesh)
    engine.initialize_weights(config.seed)
    train, heldout = (
        open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split=split)
        for split in ("train", "heldout")
    )
    state = TrainState()
    rows = [run_step(config, engine, train, state).row for _ in range(config.train.steps)]
    evaluated = heldout_loss(config, engine, heldout, lambda: None)
    folder = config.run_path / "checkpoints"
    save(folder, engine, state, None, Retention(keep_last=1))
    engine.initialize_weights(config.seed + 1)
    restored, warnings = restore(str(folder), engine, config.seed, None)
    assert restored.step == state.step and not warnings, (restored.step, warnings)
    again = heldout_loss(config, engine, heldout, lambda: None)
    close_mesh()
    return rows, evaluated, again


def compare_rows(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> None:
    """Raises where a loss or a norm differs by more than its bound."""
    for key in ("loss", "grad_norm"):
        errors = [abs(mine[key] / other[key] - 1) for mine, other in zip(ours, theirs, strict=True)]
        assert max(errors) <= BOUNDS[key], f"{key}: relative errors by step {errors}, bound {BOUNDS[key]}"
