"""A training step's forward and backward passes over fake CUDA tensors: what a GPU would be asked to do, without one.

`python cuda_dry_run.py` prints a JSON object: for each case its problems, for each full-sized layer its figures, and
what a case and a layer are like under planted faults. An operation whose result's size or value depends on data raises:
there the host would wait for the GPU. Those few that may are in WAITS, with the reason.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import parallel.context_parallel.ring as ring
import parallel.expert as expert
from fake_cuda.faults import FAULTS, planted
from fake_cuda.figures import Figures, counting
from launcher.prove.shrink import WIDTH_UNIT
from modeling.config import FAMILIES, ModelConfig, MoEConfig
from modeling.context import PADDING
from modeling.decoder import Decoder
from modeling.dtypes import DTYPES
from parallel.apply import build_part
from parallel.batch import MicroBatch, cut_micro_batch
from parallel.config import ParallelConfig
from parallel.mesh import AXES, Axis, Degrees, Mesh, lone_mesh
from parallel.recompute import Recompute
from parallel.sizes import DEFAULT_SIZES
from rendezvous import as_rank
from small_models import IGNORE, example_config, packed_rows

GPU = torch.device("cuda", 0)
LENGTHS = ([7, 1, 24], [32], [3, 9, 20], [30, 2])  # of documents; 32 tokens a sequence
# Where the host may wait for the GPU.
WAITS = {
    "sizes_on_host": "all-to-all is told by the host how many rows go where: once a layer with experts, under ep alone",
    "plan_ring": "which tiles of a sequence see each other: once a micro-batch and window, under cp by ring alone",
}
PLAIN = ParallelConfig()
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one rank of a layout."""

    name: str
    config: ModelConfig
    dtype: str = "bf16"
    padding: bool = False
    recompute: Recompute = "none"
    parallel: ParallelConfig = PLAIN
    world_size: int = 1
    rank: int = 0
    most_waits: int = 0


def fitting(config: ModelConfig) -> ModelConfig:
    """Widths that grouped products take in 16 bits, and heads that eight ranks can share."""
    changes: dict[str, Any] = {"vocab_size": 64, "d_ff": 48, "n_layers": 2}
    if config.moe is not None:
        widths = {"d_ff": 3 * WIDTH_UNIT, "n_experts": 8, "n_groups": min(config.moe.n_groups, 2), "top_k": 2}
        widths |= {"top_k_groups": 1} if config.moe.n_groups > 1 else {}
        changes["moe"] = dataclasses.replace(config.moe, **widths)
    return dataclasses.replace(config, **changes)


def cases() -> Iterator[Case]:
    """Each family with each of the others' settings somewhere, and the layouts of a dense and of a MoE model."""
    settings = itertools.cycle(itertools.product(("bf16", "fp16"), (True, False), RECOMPUTE))
    for family in FAMILIES:
        config = fitting(example_config(family))
        yield Case(f"{family} bf16", config)
        dtype, padding, recompute = next(settings)
        dtype = "bf16" if config.moe is not None else dtype  # the rules for fake grouped products take no other
        yield Case(f"{family} {dtype} padding={padding} recompute={recompute}", config, dtype, padding, recompute)
    tied = fitting(example_config("llama", tie_embeddings=True))
    yield Case("tied", tied)
    yield Case("fp32", tied, dtype="fp32")
    yield from layouts()


def layouts() -> Iterator[Case]:
    """One rank of each axis alone and of some together."""
    dense, experts = fitting(example_config("qwen3")), fitting(example_config("qwen3_moe"))
    latent = fitting(example_config("deepseek_v3"))
    for name, config, parallel, world in (
        ("tp2", dense, {"tp": 2}, 2),
        ("tp2", experts, {"tp": 2}, 2),
        ("tp2", latent, {"tp": 2}, 2),
        ("cp2 ulysses", experts, {"cp": 2, "cp_attention": "ulysses"}, 2),
        ("cp2 ring", experts, {"cp": 2, "cp_attention": "ring"}, 2),
        ("cp2 ring", latent, {"cp": 2, "cp_attention": "ring"}, 2),
        ("ep4", experts, {"ep": 4}, 4),
        ("ep4", latent, {"ep": 4}, 4),
        ("pp2", experts, {"pp": 2}, 2),
        ("tp2 cp2 ep4", experts, {"tp": 2, "cp": 2, "ep": 4}, 4),
        ("tp2 pp2 ep2", latent, {"tp": 2, "pp": 2, "ep": 2}, 4),
    ):
        for rank in (0, world - 1) if "pp" in name else (world - 1,):
            for recompute in ("none", "full") if "ep" in name else ("none",):
                waits = (1 + (recompute != "none")) * config.n_layers if parallel.get("ep") else 0
                waits += parallel.get("cp_attention") == "ring"
                yield Case(
                    f"{config.family} {name} rank {rank} recompute={recompute}",
                    config,
                    recompute=recompute,
                    parallel=ParallelConfig(**parallel),
                    world_size=world,
                    rank=rank,
                    most_waits=waits,
                )


class Waited:
    """How often the host has waited for the GPU, where it may."""

    def __init__(self, case: Case) -> None:
        self.times = 0
        positions = sum(map(sum, LENGTHS)) // (case.parallel.tp * case.parallel.cp)
        self.n_pairs = positions * (case.config.moe.top_k if case.config.moe is not None else 0)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Gives the functions of WAITS results of the right shape: equal parts, all tiles seen in part."""
        sizes_on_host, plan_ring = expert.sizes_on_host, ring.plan_ring

        def equal_parts(counts_E: Tensor, theirs_NE: Tensor) -> list[list[int]]:
            self.times += 1
            return [[self.n_pairs // len(theirs_NE)] * len(theirs_NE)] * 2

        def all_tiles(whole: Any, window: int | None, axis: Axis, *rest: Any) -> Any:
            from parallel.context_parallel.plan import TILE, _all_tiles

            self.times += 1
            return [_all_tiles(whole, window, axis, rank, *(rest or (TILE,))) for rank in range(axis.degree)]

        expert.sizes_on_host, ring.plan_ring = equal_parts, all_tiles
        try:
            yield
        finally:
            expert.sizes_on_host, ring.plan_ring = sizes_on_host, plan_ring


def mesh_of(case: Case) -> Mesh:
    """This rank's mesh, of groups that move nothing."""
    if case.world_size == 1:
        return lone_mesh(GPU)
    degrees = Degrees.of(case.parallel, case.world_size)
    axes = {}
    for name in AXES:
        line = next(line for line in degrees.lines(name) if case.rank in line)
        axes[name] = Axis(line.index(case.rank), len(line), line, dist.new_group(list(line)))
    return Mesh(rank=case.rank, world_size=case.world_size, device=GPU, control=None, **axes)


def batch_on_host(config: ModelConfig, padding: bool, mesh: Mesh) -> MicroBatch:
    """Real rows, cut for this rank."""
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    if padding:
        rows.documents_BS[0, -5:] = PADDING
    targets_BS = rows.tokens_BS.roll(-1, 1)
    targets_BS[:, -1] = IGNORE
    scales = (1.0 / len(LENGTHS), 1.0 / rows.tokens_BS.numel())
    batch = cut_micro_batch(
        rows.tokens_BS, targets_BS, rows.positions_BS, rows.documents_BS, mesh, *scales, has_padding=padding
    )
    return told_on_host(batch)


def told_on_host(batch: MicroBatch) -> MicroBatch:
    """The batch after what ``Context.to`` tells before it moves anything."""
    for context in (batch.context, getattr(batch.context, "whole", None), batch.context.part):
        if context is not None:
            _ = context.cu_seqlens, context.valid_T
    return batch


def on_gpu(batch: MicroBatch, mode: FakeTensorMode) -> MicroBatch:
    """The batch as ``MicroBatch.to`` moves it, fake from there on."""

    def faked(each: Any) -> Any:
        if isinstance(each, Tensor):
            return mode.from_tensor(each).to(GPU)
        if isinstance(each, tuple):
            return tuple(map(faked, each))
        if dataclasses.is_dataclass(each) and not isinstance(each, type):
            vars(each).update({key: faked(value) for key, value in vars(each).items()})
        return each

    return faked(batch)


def run(case: Case) -> list[str]:
    """What is wrong with the case; nothing where all is as it should be."""
    waited = Waited(case)
    with contextlib.ExitStack() as stack:
        if case.world_size > 1:
            stack.enter_context(as_rank(case.rank, case.world_size))
        mesh = mesh_of(case)
        batch = batch_on_host(case.config, case.padding, mesh)
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(waited.watching())
        dtype = DTYPES[case.dtype]
        arguments = (case.config, case.parallel, dtype, lambda parameter, place: None, DEFAULT_SIZES, case.recompute)
        model = build_part(mesh, *arguments)
        batch = on_gpu(batch, mode)
        hidden_BSD = None
        if model.embed is None:
            model.takes_tokens = False
            part = batch.context.between_layers.positions_BS.shape
            hidden_BSD = torch.empty(*part, case.config.d_model, dtype=dtype, device=GPU, requires_grad=True)
        backward(model, batch, hidden_BSD)
        return [*gradient_problems(model, dtype), *wait_problems(case, waited)]


def backward(model: Decoder, batch: MicroBatch, hidden_BSD: Tensor | None = None) -> None:
    """A micro-batch's two passes through the part of a decoder that is here."""
    inputs = batch.tokens_BS if hidden_BSD is None else hidden_BSD
    has_head = model.head is not None
    out = model(inputs, batch.context, batch.targets_BS if has_head else None)
    end = out.loss if has_head else out.logits_BSV if out.logits_BSV is not None else out.hidden_BSD
    assert end is not None and end.device == GPU
    torch.autograd.backward(end, None if has_head else torch.empty_like(end))


def gradient_problems(model: Decoder, dtype: torch.dtype) -> list[str]:
    """Each weight's gradient: there, and of the weight's device, dtype and shape."""
    found = []
    for name, weight in model.named_parameters():
        grad = weight.grad
        if grad is None:
            found.append(f"{name} has no gradient")
        elif (grad.device, grad.dtype, grad.shape) != (GPU, dtype, weight.shape):
            found.append(f"{name}'s gradient is {grad.device} {grad.dtype} {tuple(grad.shape)}")
    return found


def wait_problems(case: Case, waited: Waited) -> list[str]:
    """More waits than the case may have."""
    if waited.times <= case.most_waits:
        return []
    return [f"the host waits {waited.times} times, and may {case.most_waits}"]


def problems_of(work: Callable[[], list[str]]) -> list[str]:
    """What the work finds, or its exception in a line."""
    try:
        return work()
    except Exception as error:
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        return [f"{type(error).__name__} at {where}: {str(error).splitlines()[0][:200] if str(error) else ''}"]


# Published shapes, of which one layer's figures are the difference between models of two layers and of one.
LAYERS = {
    "dense 8B": ModelConfig(
        vocab_size=128256, d_model=4096, n_layers=2, n_heads=32, n_kv_heads=8, d_head=128, d_ff=14336
    ),
    "MoE 30B-A3B": ModelConfig(
        family="qwen3_moe",
        vocab_size=151936,
        d_model=2048,
        n_layers=2,
        n_heads=32,
        n_kv_heads=4,
        d_head=128,
        qk_norm=True,
        d_ff=6144,
        moe=MoEConfig(n_experts=128, top_k=8, d_ff=768, z_loss=1e-4),
    ),
}
FULL_LENGTH = 8192


def layer_figures(config: ModelConfig) -> dict[str, Figures]:
    """Launches, bytes and FLOPs of one layer's forward and backward passes over a sequence of FULL_LENGTH."""
    by_depth = [passes(dataclasses.replace(config, n_layers=n_layers)) for n_layers in (1, 2)]
    return {name: by_depth[1][name] - by_depth[0][name] for name in by_depth[0]}


def passes(config: ModelConfig) -> dict[str, Figures]:
    """Those of a whole model."""
    mesh = lone_mesh(GPU)
    rows = packed_rows(64, 0, [[FULL_LENGTH]])
    batch = cut_micro_batch(
        rows.tokens_BS, rows.tokens_BS, rows.positions_BS, rows.documents_BS, mesh, 1.0, 1.0, has_padding=False
    )
    batch = told_on_host(batch)
    with FakeTensorMode() as mode:
        ignore = lambda parameter, place: None  # noqa: E731 -- nobody adopts
        model = build_part(mesh, config, ParallelConfig(), torch.bfloat16, ignore, DEFAULT_SIZES, "none")
        batch = on_gpu(batch, mode)
        with counting() as forward:
            out = model(batch.tokens_BS, batch.context, batch.targets_BS)
        with counting() as back:
            torch.autograd.backward(out.loss)
    return {"forward": forward, "backward": back}


def main() -> None:
    """Prints the JSON object."""
    logging.disable(logging.CRITICAL)
    sound = {case.name: case for case in cases()}
    answer: dict[str, Any] = {
        "cases": {name: problems_of(lambda case=case: run(case)) for name, case in sound.items()},
        "layers": {name: layer_figures(config) for name, config in LAYERS.items()},
        "faults": {},
    }
    for name, fault in FAULTS.items():
        with planted(name):
            answer["faults"][name] = problems_of(lambda case=sound[fault.case]: run(case))
            if fault.is_slower:
                answer["slower layer"] = layer_figures(LAYERS["dense 8B"])
    print(json.dumps(answer, default=dataclasses.asdict))
