"""Functions that tests of parallel layouts run in each rank, and the comparison of their results with one process."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.config import DataConfig, SourceConfig
from data.dataset import open_dataset
from data.order import take
from launcher.config.tree import RunConfig, TrainConfig
from launcher.prove.reference import PlainBatch, ReferenceTrainer
from modeling.config import ModelConfig
from modeling.logical import logical_shapes
from modeling.moe_config import MoEConfig, SequenceAuxBalance
from modeling.optimizers.config import OptimizerConfig, SGDConfig
from modeling.schedules import ConstantSchedule
from parallel.checkpoint.boxes import Box, coverage_error
from parallel.config import ParallelConfig

VOCAB_SIZE = 96
MOE_MODEL = ModelConfig(
    family="glm4_moe",
    vocab_size=VOCAB_SIZE,
    d_model=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    d_ff=48,
    qk_norm=True,
    tie_embeddings=True,
    moe=MoEConfig(
        n_experts=4,
        top_k=2,
        d_ff=24,
        n_shared_experts=1,
        n_dense_layers=1,
        score="sigmoid",
        z_loss=1e-2,
        balance=SequenceAuxBalance(coefficient=0.05),
    ),
)
DENSE_MODEL = ModelConfig(vocab_size=VOCAB_SIZE, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48)


@dataclass
class RankResult:
    """One rank's metrics rows, and the pieces of weights and optimizer states that it owns at the end."""

    rows: list[dict[str, Any]]  # metrics rows
    pieces: list[tuple[str, str, Box, Tensor]]  # kind, name, box of the logical tensor, its elements
    shapes: dict[str, tuple[int, ...]]
    buffers: dict[str, Tensor]


@dataclass
class LayoutResult:
    """The results of all ranks merged into whole logical tensors."""

    rows: list[dict[str, Any]]
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # kind -> name -> logical tensor
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    @property
    def grad_norms(self) -> list[float]:
        return [row["grad_norm"] for row in self.rows]


def write_tokens(
    folder: Path, *, n_documents: int = 60, longest: int = 40, seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> str:
    """Writes random documents of random lengths as a Megatron token file; returns its prefix."""
    from data.tokenwriter import TokenFileWriter

    random = np.random.default_rng(seed)
    prefix = folder / "tokens"
    writer = TokenFileWriter(prefix, np.dtype(np.uint16))
    for _ in range(n_documents):
        writer.add(random.integers(1, vocab_size, size=random.integers(1, longest)))
    writer.finish()
    return str(prefix)


def run_config(
    tokens: str,
    *,
    model: ModelConfig = MOE_MODEL,
    optimizer: OptimizerConfig | None = None,
    parallel: ParallelConfig | None = None,
    zero: int = 1,
    steps: int = 3,
    **train: Any,
) -> RunConfig:
    """The config of a small run on the token file ``tokens``: 8 sequences of 24 tokens a step."""
    settings = {"steps": steps, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp32", **train}
    return RunConfig(
        model=model,
        data=DataConfig(seq_len=24, sources=(SourceConfig(path=tokens),)),
        train=TrainConfig(**settings),
        optimizer=optimizer or SGDConfig(lr=0.5, momentum=0.9, clip_norm=0.5),
        schedule=ConstantSchedule(),
        parallel=parallel or ParallelConfig(zero=zero),
    )


def train_rank(config: RunConfig, fault: str | None = None, *, small_sizes: bool = False) -> RankResult:
    """One rank: trains train.steps updates from step 0 with the real loop's step. All ranks call it.

    ``fault``: a fault of ``faults`` to plant. ``small_sizes``: use the sizes of a proof, with which even the small
    tensors of a small model are offloaded to the host.
    """
    from faults import plant
    from launcher.prove.shrink import SMALL_SIZES
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState
    from parallel.mesh import close_mesh, open_mesh
    from parallel.recompute import offloader_in
    from parallel.sizes import DEFAULT_SIZES

    plant(fault)
    mesh = open_mesh(config.parallel, 120)
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    engine = build_engine(config, mesh, SMALL_SIZES if small_sizes else DEFAULT_SIZES)
    engine.initialize_weights(config.seed)
    state = TrainState()
    rows = [run_step(config, engine, dataset, state).row for _ in range(config.train.steps)]
    offloader = offloader_in(engine.model)
    sends = offloader is not None and any(int(name) != offloader.stays for name in engine.model.layers)
    assert (offloader is not None and offloader.pool.n_pages > 0) == (sends and small_sizes)
    assert (offloader is not None) == config.train.offload_activations
    result = rank_result(engine, rows)
    close_mesh()
    return result


def rank_result(engine: Any, rows: list[dict[str, Any]]) -> RankResult:
    """The result of this rank: copies of all pieces that it owns of weights and states, and of its buffers."""
    pieces = []
    for fragment in (fragment for fragment in engine.fragments if fragment.is_owner):
        for kind, flat in engine.pieces(fragment).items():
            parts = flat.clone().split([box.numel for box in fragment.boxes()])
            pieces += [(kind, fragment.name, box, part) for box, part in zip(fragment.boxes(), parts, strict=True)]
    buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    return RankResult(rows, pieces, logical_shapes(engine.model_config), buffers)


def run_layout(config: RunConfig, n_ranks: int, fault: str | None = None, *, small_sizes: bool = False) -> LayoutResult:
    """Trains under the config's layout on ``n_ranks`` gloo processes; returns the merged result."""
    from parallel.processes.start import run_ranks

    train = partial(train_rank, small_sizes=small_sizes)
    return merge(run_ranks(train, n_ranks, config, fault, timeout_seconds=240, threads=1))


def merge(results: list[RankResult]) -> LayoutResult:
    """The ranks' pieces put together to whole tensors; fails unless every element is there exactly once."""
    merged = LayoutResult(results[0].rows)
    for result in results:
        merged.buffers |= result.buffers
    boxes: dict[tuple[str, str], list[Box]] = {}
    for result in results:
        for kind, name, box, values in result.pieces:
            state = merged.state.setdefault(kind, {})
            whole = state.setdefault(name, torch.full(result.shapes[name], float("nan")))
            whole[box.slices] = values.view(box.shape)
            boxes.setdefault((kind, name), []).append(box)
    for (kind, name), held in boxes.items():
        assert coverage_error(tuple(merged.state[kind][name].shape), held) is None, (kind, name)
    return merged


def run_reference(
    config: RunConfig, micro_batch_size: int | None = None, skipped: Collection[int] = ()
) -> LayoutResult:
    """The config's steps on one plain process, without DeepSpeed or parallel code, except those in ``skipped``."""
    loss_scale = 2.0**16 if config.train.precision == "fp16" else 1.0
    trainer = ReferenceTrainer(
        config.model, config.optimizer, seed=config.seed, precision=config.train.precision, loss_scale=loss_scale
    )
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    result, sizes = LayoutResult([]), config.train.batches
    for step in range(config.train.steps):
        if step + 1 in skipped:
            continue
        indices = take(sizes.samples_in(step), sizes.size_at(step + 1))
        batches = [
            read(dataset, part)
            for part in np.split(indices, len(indices) // (micro_batch_size or config.train.micro_batch_size))
        ]
        seen = trainer.step(batches, config.optimizer.lr, number=step + 1)
        result.rows.append({"loss": seen.loss, "grad_norm": seen.grad_norm})
    result.state["weight"] = {name: master.detach() for name, master in trainer.masters.items()}
    result.buffers = dict(trainer.model.named_buffers())
    return result


def read(dataset: Any, indices: np.ndarray) -> PlainBatch:
    """The samples ``indices`` as a batch for the reference trainer."""
    batch = dataset.read(indices)
    arrays = (batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS)
    return PlainBatch(*(torch.from_numpy(array) for array in arrays), samples_B=torch.from_numpy(indices))


def assert_same_bits(found: LayoutResult, wanted: LayoutResult) -> None:
    """Asserts that losses, gradient norms, weights and optimizer states are equal bit for bit."""
    assert found.losses == wanted.losses
    assert found.grad_norms == wanted.grad_norms
    assert found.state.keys() == wanted.state.keys() and len(found.state) > 0
    for kind, tensors in wanted.state.items():
        assert found.state[kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found.state[kind][name], tensor), (kind, name)


def largest_error(ours: LayoutResult, reference: LayoutResult) -> dict[str, float]:
    """The largest errors: relative ones of losses and norms over the steps, absolute ones of weights and buffers."""
    names = reference.state["weight"]
    weights = max(float((ours.state["weight"][name] - names[name]).abs().max()) for name in names)
    buffers = [float((ours.buffers[name] - value).abs().max()) for name, value in reference.buffers.items()]
    return {
        "loss": relative(ours.losses, reference.losses),
        "grad_norm": relative(ours.grad_norms, reference.grad_norms),
        "weight": weights,
        "buffer": max(buffers, default=0.0),
    }


def relative(mine: list[float], theirs: list[float]) -> float:
    """The largest relative error between two lists of numbers, one for each step."""
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))
