"""The memory that is told before a start, against the tensors of real engines: equal to the byte."""

import dataclasses
from typing import Any

import pytest

from launcher.config.tree import RunConfig
from launcher.plan.closed_forms import step_of_rank
from launcher.plan.memory import Memory, cut_bytes, rank_memory
from layout_runs import MOE_MODEL, VOCAB_SIZE, run_config, write_tokens
from modeling.optimizers.config import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig
from parallel.config import ParallelConfig
from parallel.mesh import Degrees
from parallel.pipeline.config import ZBV

ODD_MODEL = dataclasses.replace(MOE_MODEL, n_layers=4, vocab_size=VOCAB_SIZE + 1)  # no group is a multiple of its ranks
EACH = {"grad_reduce": "micro_batch"}
LAYOUTS = {
    "zero0": (2, "fp32", ParallelConfig(zero=0)),
    "zero0_tp_ep": (4, "fp32", ParallelConfig(tp=2, ep=2, zero=0)),
    "zero1_fp32": (3, "fp32", ParallelConfig(zero=1)),
    "zero1_bf16": (3, "bf16", ParallelConfig(zero=1)),
    "zero2_bf16": (2, "bf16", ParallelConfig(zero=2)),
    "zero2_tp": (4, "fp32", ParallelConfig(zero=2, tp=2)),
    "zero3_bf16": (3, "bf16", ParallelConfig(zero=3)),
    "zero3_not_shared": (2, "fp32", ParallelConfig(zero=3, tp=2)),
    "zero1_ep": (4, "bf16", ParallelConfig(zero=1, ep=2)),
    "zero3_ep_tp": (4, "fp32", ParallelConfig(zero=3, ep=4, tp=2)),
    "zero1_pp": (4, "bf16", ParallelConfig(zero=1, pp=2)),
    "zero1_each_bf16": (3, "bf16", ParallelConfig(zero=1, **EACH)),
    "zero1_each_fp32_ep": (4, "fp32", ParallelConfig(zero=1, ep=2, **EACH)),
    "zero1_each_pp": (4, "bf16", ParallelConfig(zero=1, pp=2, **EACH, grad_reduce_dtype="bf16")),
    "zero1_last_pp": (4, "fp32", ParallelConfig(zero=1, pp=2, grad_reduce="last_micro_batch")),
    "zero1_pp_in_a_v": (2, "bf16", ParallelConfig(zero=1, pp=2, pipeline=ZBV(layers=(1, 1, 1, 1)))),
}


def measure_rank(config: RunConfig) -> Memory:
    """What this rank's engine holds between steps, and of gradients after a micro-batch (under pp: before it)."""
    import numpy as np

    from data.dataset import open_dataset
    from launcher.training.loop import build_engine
    from launcher.training.step import read_micro_batch
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(config.parallel, 120)
    dataset = open_dataset(config.data, seed=0, vocab_size=config.model.vocab_size, split="train")
    engine = build_engine(config, mesh)
    engine.initialize_weights(0)
    found = held(engine)
    if engine.pipeline is None:
        batch = read_micro_batch(dataset, np.arange(2), mesh)
        output = engine.model(batch.tokens_BS, batch.context, batch.targets_BS)
        engine.backward(output.loss, 1.0, last=engine.zero == 2)
        assert not engine.sharding.scatters or all(weight.grad is None for weight in engine.model.parameters())
    found = dataclasses.replace(found, gradients=gradient_bytes(engine))
    close_mesh()
    return found


def held(engine: Any) -> Memory:
    """Bytes of the engine's tensors between two steps, each storage once."""
    parameters = list(engine.model.parameters())
    weights = [weight.data for weight in parameters] + [w.ds_tensor for w in parameters if hasattr(w, "ds_tensor")]
    masters = [fragment.flat for fragment in engine.fragments] if engine.zero else []
    states = [state[name] for state in engine.base.state.values() for name in engine.rule.states if name in state]
    return Memory(bytes_of(weights), bytes_of(masters), bytes_of(states), gradients=0)


def gradient_bytes(engine: Any) -> int:
    """Bytes of the sums over the micro-batches so far."""
    optimizer = engine.sharding.optimizer
    if engine.sharding.scatters:
        return bytes_of([bucket.total for bucket in engine.sharding.buckets])
    if engine.sharding.sums_here:
        return bytes_of([bucket.whole for bucket in engine.sharding.buckets])
    if engine.zero == 1 and engine.precision == "bf16":
        return bytes_of(optimizer.fp32_groups_gradients_flat)
    if engine.zero == 3:
        return bytes_of([optimizer.grad_partitions_flat_buffer])
    if engine.zero == 2:  # the parts of weights that lie in this rank's share
        return 4 * sum(part.numel() for parts in optimizer.averaged_gradients.values() for part in parts)
    return bytes_of([weight.grad for weight in engine.model.parameters()])


def bytes_of(tensors: list[Any]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


CASES = [(name, AdamWConfig()) for name in LAYOUTS] + [
    ("zero1_bf16", SGDConfig(momentum=0.9)),
    ("zero0_tp_ep", MuonConfig()),
    ("zero1_ep", MuonConfig()),
    ("zero3_bf16", MuonConfig()),
]
QUICK = ("zero1_bf16-adamw", "zero3_bf16-adamw", "zero1_each_bf16-adamw", "zero0_tp_ep-muon", "zero1_ep-muon")


def case_of(layout: str, optimizer: OptimizerConfig) -> Any:
    name = f"{layout}-{optimizer.name}"
    return pytest.param(layout, optimizer, id=name, marks=[] if name in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize(("layout", "optimizer"), [case_of(*case) for case in CASES])
def test_memory_is_what_the_engines_hold(tmp_path, layout, optimizer):
    from parallel.processes.start import run_ranks

    n_ranks, precision, parallel = LAYOUTS[layout]
    config = run_config(
        write_tokens(tmp_path),
        model=MOE_MODEL if parallel.tp > 1 or parallel.zero == 2 else ODD_MODEL,
        optimizer=optimizer,
        parallel=parallel,
        precision=precision,
        global_batch_size=12,
    )
    found = run_ranks(measure_rank, n_ranks, config, timeout_seconds=240, threads=1)
    degrees = Degrees.of(parallel, n_ranks)
    assert found == [rank_memory(step_of_rank(config, n_ranks, rank // degrees.stage)) for rank in range(n_ranks)]


def kept_bytes(config: RunConfig) -> int:
    """What this rank's engine keeps of its weights in 8 bits after a step."""
    from launcher.estimate.samples import WholeSequences
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState
    from parallel.mesh import close_mesh, open_mesh

    engine = build_engine(config, open_mesh(config.parallel, 120))
    engine.initialize_weights(0)
    run_step(config, engine, WholeSequences(config), TrainState())  # type: ignore[arg-type]
    close_mesh()
    return bytes_of(engine.products.kept())


@pytest.mark.parametrize("parallel", [ParallelConfig(zero=1, tp=2, ep=2), ParallelConfig(zero=2, pp=2)], ids=str)
def test_weights_kept_in_8_bits_are_what_the_forms_say(tmp_path, parallel):
    from parallel.processes.start import run_ranks

    options = {"precision": "fp8", "fp8_keep_weights": True, "model": MOE_MODEL, "optimizer": SGDConfig()}
    config = run_config(write_tokens(tmp_path), parallel=parallel, global_batch_size=8, **options)
    found = run_ranks(kept_bytes, 2, config, timeout_seconds=240, threads=1)
    stage = Degrees.of(parallel, 2).stage
    assert found == [cut_bytes(step_of_rank(config, 2, rank // stage)) for rank in range(2)]
