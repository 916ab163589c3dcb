"""What the ranks of whole runs begin comes in one order on all groups at once, as NCCL needs it on one stream.

From the first roll call to the last save, with evaluations and saves between the steps, under all axes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.config.tree import CheckpointConfig, RunConfig
from layout_runs import MOE_MODEL, run_config, write_tokens
from modeling.optimizers.config import AdamWConfig
from parallel.config import ParallelConfig
from parallel.pipeline.config import ZBV, Interleaved
from rendezvous import Begun, stuck
from rendezvous_runs import queues_of_run

TRAINING, SAVING = "MainThread", "checkpoint writer"
LAYERS = replace(MOE_MODEL, n_layers=4)


def whole_run(folder: Path, parallel: ParallelConfig, **train: Any) -> RunConfig:
    """Two steps, each with an evaluation and a save beside training."""
    config = run_config(
        write_tokens(folder),
        model=LAYERS,
        optimizer=AdamWConfig(lr=1e-3, clip_norm=0.5),
        parallel=parallel,
        steps=2,
        **{"micro_batch_size": 1, "eval_every_steps": 1, "eval_sequences": 3, **train},
    )
    data = replace(config.data, heldout_path=config.data.sources[0].path)
    return replace(config, run_dir=str(folder / "run"), data=data, checkpoint=CheckpointConfig(every_steps=1))


def check(config: RunConfig, n_ranks: int) -> None:
    """Every thread's queues come to their end, and training's have collectives in more groups than one."""
    queues = queues_of_run(config, n_ranks)
    assert set(queues) == {TRAINING, SAVING}
    for thread, of_ranks in queues.items():
        assert stuck(of_ranks) == [], thread
    assert len({begun.ranks for entry in queues[TRAINING][0] for begun in entry}) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_ranks", "parallel", "train"),
    [
        (4, ParallelConfig(tp=2, pp=2, ep=2, zero=1), {"precision": "bf16"}),
        (8, ParallelConfig(tp=2, pp=2, ep=2, zero=1), {"precision": "bf16"}),
        (8, ParallelConfig(tp=2, pp=2, ep=2, tp_overlap=True, grad_reduce="micro_batch"), {"recompute": "selective"}),
        (8, ParallelConfig(pp=2, cp=2, ep=4, zero=2), {"recompute": "full"}),
        (8, ParallelConfig(tp=2, pp=2, cp=2, cp_attention="ring", pipeline=ZBV()), {}),
        (4, ParallelConfig(pp=2, zero=3, pipeline=Interleaved()), {}),
        (4, ParallelConfig(tp=2, ep=4, zero=3), {"precision": "fp16"}),
        (4, ParallelConfig(ep=2, zero=0), {"recompute": "selective"}),
    ],
)
def test_a_whole_run_ends(tmp_path: Path, n_ranks: int, parallel: ParallelConfig, train: dict[str, Any]) -> None:
    check(whole_run(tmp_path, parallel, **train), n_ranks)


@pytest.mark.slow
def test_sums_begun_in_another_order_are_caught(tmp_path: Path) -> None:
    """Planted: two groups' sums that half of the ranks begin the other way round, which gloo lets pass.

    And in the record: a collective that one rank alone begins.
    """
    config = whole_run(tmp_path, ParallelConfig(tp=2))
    queues = queues_of_run(config, 4, "out of order")[TRAINING]
    assert stuck(queues) != []
    before = [queue[:10] for queue in queues]  # of the first step
    assert stuck(before) == []
    alone = [*before[0][:5], (Begun("allreduce", (0, 1)),), *before[0][5:]]
    assert stuck([alone, *before[1:]]) != []
