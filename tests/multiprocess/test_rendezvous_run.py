"""What the ranks of whole runs begin comes in one order on all groups at once, as NCCL needs it on one stream.

From the first roll call to the last save, with evaluations and saves between the steps, under all axes. In drawn runs
results arrive only when they are waited for (tests/support/late_collectives.py).
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from data.config import SourceConfig
from launcher.config.tree import CheckpointConfig, RunConfig
from layout_runs import MOE_MODEL, run_config, write_tokens
from modeling.optimizers.config import AdamWConfig
from parallel.config import ParallelConfig
from parallel.pipeline.config import ZBV, Interleaved
from random_switches import random_free_run, random_switched_run
from rendezvous import Begun, Queue, stuck
from rendezvous_runs import FORGETFUL, in_ranks_of_run, late_in_run, queues_of_run
from rotating import some_fast

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


N_SEEDS = 40
Drawing = Callable[[int], tuple[RunConfig, int]]


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [random_switched_run, random_free_run])
@pytest.mark.parametrize("seed", range(N_SEEDS))
def test_a_drawn_run_ends_and_waits_for_what_it_reads(tmp_path: Path, seed: int, drawn: Drawing) -> None:
    """Layouts, switches and models that nobody chose (tests/support/random_switches.py), with late communications.

    A number that is read before it has arrived is NaN, and so would the losses be.
    """
    config, n_ranks = drawn(seed)
    tokens = write_tokens(tmp_path, longest=70, vocab_size=config.model.vocab_size)
    data = replace(config.data, sources=(SourceConfig(path=tokens),), heldout_path=tokens)
    train = replace(config.train, steps=2, eval_every_steps=1, eval_sequences=3)
    config = replace(config, data=data, train=train, checkpoint=CheckpointConfig(every_steps=1))
    queues, rows, found = late_run(replace(config, run_dir=str(tmp_path / "run")), n_ranks)
    assert found == set()
    assert [line for of_ranks in queues.values() for line in stuck(of_ranks)] == []
    assert len(rows) == 2 and all(isfinite(float(row["loss"])) for row in rows)


def late_run(config: RunConfig, n_ranks: int, fault: str | None = None) -> tuple[dict[str, list[Queue]], list, set]:
    """Every thread's queues in a run with late communications, the rows of its steps, and the faults of all ranks."""
    by_rank = in_ranks_of_run(late_in_run, config, n_ranks, fault)
    names = dict.fromkeys(name for queues, _ in by_rank for name in queues)
    rows = map(json.loads, (config.run_path / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in rows if "grad_norm" in row and "event" not in row]
    queues = {name: [queues.get(name, []) for queues, _ in by_rank] for name in names}
    return queues, steps, set(chain.from_iterable(found for _, found in by_rank))


@pytest.mark.parametrize("fault", some_fast([None, *FORGETFUL], "rows"))
def test_a_wait_that_is_forgotten_is_seen(tmp_path: Path, fault: str | None) -> None:
    """Rows of experts, or gradients by the hidden states of tp, that are read before they have arrived."""
    parallel = ParallelConfig(tp=2, ep=2, tp_overlap=True, ep_chunks=2)
    config = whole_run(tmp_path, parallel, precision="fp32")
    _, rows, found = late_run(config, 2, fault)
    assert all(isfinite(float(row["grad_norm"])) == (fault is None) for row in rows) and len(rows) == 2
    assert (found == set()) == (fault is None)


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
