"""Runs a training step's forward and backward passes over fake CUDA tensors, to check without a GPU what one would do.

`python cuda_dry_run.py` prints a JSON object: the problems of each case, the figures of full-sized layers, and the
problems and figures under planted faults; with `--whole`, for all cases, otherwise for FAST, FAST_LAYERS and
FAST_WORLDS.

An operation whose result's size or value depends on data raises, since the host would wait for the GPU there. The few
operations that may do so are listed in WAITS, with the reason.
"""

import contextlib
import dataclasses
import json
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import modeling.kernels.attention as attention
import parallel.context_parallel.pieces as ring_pieces
import parallel.context_parallel.ring as ring
import parallel.expert as expert
from fake_cuda import host
from fake_cuda.cases import PLAIN, Case, cases, fitting
from fake_cuda.faults import FAULTS, planted
from fake_cuda.host import copies_to_device, on_host
from launcher.config.tree import RunConfig
from launcher.estimate.batch import on_device, told_on_host
from launcher.estimate.pass_over import even, spread_evenly, trace_rank
from launcher.estimate.ranks import as_rank, mesh_of
from launcher.trace.hardware import read_hardware
from launcher.trace.ops import Figures
from launcher.trace.parts import Axes
from launcher.trace.recorder import Recorder
from launcher.trace.regions import Regions
from launcher.trace.roofline import least_seconds
from launcher.training.step import Sums
from modeling.config import ModelConfig
from modeling.context import PADDING
from modeling.counts import multiplied_by_layer
from modeling.decoder import Decoder, Output
from modeling.dropout import Draws
from modeling.dtypes import DTYPES
from modeling.kernels.fuse import Fuse, compiled, plainly
from modeling.moe_config import MoEConfig
from parallel.apply import build_part
from parallel.batch import MicroBatch, cut_micro_batch
from parallel.config import ParallelConfig
from parallel.context_parallel.context import HeldContext
from parallel.mesh import Axis, Mesh, lone_mesh, sum_over_ranks
from parallel.offload import OnStreams
from parallel.processes.stop import StopRequest
from parallel.sizes import DEFAULT_SIZES
from small_models import IGNORE, example_config, packed_rows
from stream_races import Races

GPU = torch.device("cuda", 0)
SEQ_LEN = 32  # in comparisons with closed forms
LENGTHS = ([7, 1, 24], [32], [3, 9, 20], [30, 2])  # document lengths in each sequence of 32 tokens
# Where the host may wait for the GPU.
WAITS = {
    "sizes_on_host": "all-to-all is told by the host how many rows go where: once a layer with experts, under ep alone",
    "plan_ring": "which tiles of a sequence see each other: once a micro-batch and window, where a ring goes by tiles",
}
SIZES = dataclasses.replace(DEFAULT_SIZES, page_bytes=1 << 12, least_offloaded_bytes=1 << 9)
# Cases that run with every `make test`: kinds of norms, attention, positions and experts, each axis, fp8 and offload.
FAST = (
    "gemma2 fp16 padding=True recompute=feed_forward compiled",
    "deepseek_v3 bf16 padding=True recompute=full compiled",
    "qwen2_moe bf16 padding=False recompute=selective compiled",
    "bloom bf16 padding=True recompute=full compiled",
    "gpt2 bf16 padding=True recompute=selective",
    "gpt_oss bf16",
    "llama longrope",
    "gemma2 in pieces",
    "t5 in pieces",
    "alibi in pieces",
    "qwen3_moe fp8 compiled ep4",
    "deepseek_v3 auxiliary losses compiled",
    "gpt_oss cp2 ring rank 1 recompute=none",
    "qwen3_moe ep4 in 2 chunks rank 3 recompute=none",
    "deepseek_v3 tp2 pp2 ep2 rank 3 recompute=none",
    "qwen3_moe tp2 cp2 ep4 rank 3 recompute=full",
    "qwen3 offloads tp2 overlap recompute=selective",
)
FAST_LAYERS = ("dense 8B, compiled", "MoE 30B-A3B", "MoE 30B-A3B, compiled", "MoE 30B-A3B, ep 8, compiled")
FAST_WORLDS = ("alone", "ep2", "pp2")


class Waited:
    """Counts how often the host waits for the GPU in the functions of WAITS."""

    def __init__(self, case: Case) -> None:
        self.times = 0
        positions = sum(map(sum, LENGTHS)) // (case.parallel.tp * case.parallel.cp)
        self.n_pairs = positions * (case.config.moe.top_k if case.config.moe is not None else 0)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the functions of WAITS return results of the right shape: equal parts, all tiles.

        Copies from the host are made without page-locked memory, which fake tensors do not support.
        """
        sizes_on_host, plan_ring, to_device = expert.sizes_on_host, ring.plan_ring, ring_pieces.to_device

        def equal_parts(counts_E: Tensor, theirs_NE: Tensor, parts: list[int]) -> list[list[list[int]]]:
            self.times += 1
            return even(self.n_pairs)(counts_E, theirs_NE, parts)

        def all_tiles(whole: Any, window: int | None, axis: Axis, *rest: Any) -> Any:
            from parallel.context_parallel.plan import TILE, _all_tiles

            self.times += 1
            return [_all_tiles(whole, window, axis, rank, *(rest or (TILE,))) for rank in range(axis.degree)]

        expert.sizes_on_host, ring.plan_ring = equal_parts, all_tiles
        ring_pieces.to_device = lambda tensor, device: tensor.to(device, non_blocking=True)
        try:
            yield
        finally:
            expert.sizes_on_host, ring.plan_ring, ring_pieces.to_device = sizes_on_host, plan_ring, to_device


def batch_on_host(config: ModelConfig, padding: bool, mesh: Mesh) -> MicroBatch:
    """Real rows, cut for this rank, with dropout's draws and the inputs of multi-token-prediction modules."""
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    rows_B, places_S = (torch.arange(n) for n in rows.tokens_BS.shape)
    further: dict[str, Any] = {"draws": Draws(0, 1, rows_B, places_S) if config.has_dropout else None}
    further["ahead_scales"] = [0.1] * config.mtp.depth if config.mtp is not None else []
    if padding:
        rows.documents_BS[0, -5:] = PADDING
    targets_BS = rows.tokens_BS.roll(-1, 1)
    targets_BS[:, -1] = IGNORE
    scales = (1.0 / len(LENGTHS), 1.0 / rows.tokens_BS.numel())
    batch = cut_micro_batch(
        rows.tokens_BS, targets_BS, rows.positions_BS, rows.documents_BS, mesh, *scales, has_padding=padding, **further
    )
    return told_on_host(batch)


def run(case: Case) -> list[str]:
    """Runs one case; returns a line for each problem."""
    waited = Waited(case)
    with contextlib.ExitStack() as stack:
        if case.world_size > 1:
            stack.enter_context(as_rank(case.rank, case.world_size))
        mesh = mesh_of(case.parallel, case.world_size, case.rank, GPU)
        batch = batch_on_host(case.config, case.padding, mesh)
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(waited.watching())
        if case.row_block is not None:
            stack.enter_context(mock.patch.object(attention, "row_block", return_value=case.row_block))
        dtype = DTYPES[case.dtype]
        races = stack.enter_context(Races().streams()) if case.offloads else None
        copies = OnStreams(GPU) if case.offloads else None
        arguments = (case.config, case.parallel, dtype, lambda parameter, place: None, SIZES, case.recompute)
        model = build_part(mesh, *arguments, case.fuse, case.products, copies=copies)
        batch = on_device(batch, mode, GPU)
        hidden_BSD = None
        if model.embed is None:
            model.takes_tokens = False
            part = batch.context.between_layers.positions_BS.shape
            hidden_BSD = torch.empty(*part, case.config.d_model, dtype=dtype, device=GPU, requires_grad=True)
        with copies_to_device() as copied:
            output = backward(model, batch, hidden_BSD)
        problems = [*gradient_problems(model, dtype), *wait_problems(case, waited)]
        problems += [f"the host waits for a copy to the GPU: {each}" for each in sorted({*copied})]
        problems += [] if races is None else [*races.found, *stream_problems(races)]
        return problems + sums_problems(case.config, output, mesh)


def backward(model: Decoder, batch: MicroBatch, hidden_BSD: Tensor | None = None) -> Output:
    """Runs a micro-batch's forward and backward pass through this rank's part of a decoder; returns its output."""
    inputs = batch.tokens_BS if hidden_BSD is None else hidden_BSD
    has_head = model.head is not None
    ahead = batch.ahead if has_head else ()
    out = model(inputs, batch.context, batch.targets_BS if has_head else None, ahead=ahead)
    end = out.loss if has_head else out.logits_BSV if out.logits_BSV is not None else out.hidden_BSD
    assert end is not None and end.device == GPU
    torch.autograd.backward(end, None if has_head else torch.empty_like(end))
    return out


def stream_problems(races: Races) -> list[str]:
    """A problem unless there are copies to the host and back, each direction on a stream of its own."""
    if len(races.operations) == 3 and races.operations["stream 1"] >= races.operations["stream 2"] > 0:
        return []
    return [f"copies are not on two streams: {dict(races.operations)}"]


def gradient_problems(model: Decoder, dtype: torch.dtype) -> list[str]:
    """A line for each weight without a gradient, or with one of another device, dtype or shape."""
    found = []
    for name, weight in model.named_parameters():
        grad = weight.grad
        if grad is None:
            found.append(f"{name} has no gradient")
        elif (grad.device, grad.dtype, grad.shape) != (GPU, dtype, weight.shape):
            found.append(f"{name}'s gradient is {grad.device} {grad.dtype} {tuple(grad.shape)}")
    return found


def sums_problems(config: ModelConfig, output: Output, mesh: Mesh) -> list[str]:
    """Problems where the step's sums are not summed over the ranks on the GPU, or reach the host before."""
    sums = Sums(config)
    with on_host() as made:
        sums.add(output)
        total = sum_over_ranks(sums.packed(mesh, StopRequest().votes()), mesh)
    problems = [f"the step's sums are on the host, made by {name}" for name in made]
    return problems + ([] if total.device == GPU else [f"the step's sums are on {total.device}"])


def wait_problems(case: Case, waited: Waited) -> list[str]:
    """A problem where the host waits for the GPU more often than the case allows."""
    if waited.times <= case.most_waits:
        return []
    return [f"the host waits {waited.times} times, and may {case.most_waits}"]


def problems_of(work: Callable[[], list[str]]) -> list[str]:
    """The problems that ``work`` returns, or its exception as one line."""
    try:
        return work()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "site-packages" not in f.filename and f.filename != host.__file__]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        return [f"{type(error).__name__} at {where}: {str(error).splitlines()[0][:200] if str(error) else ''}"]


# Models of published shapes; the figures of a layer are the difference between models of two layers and of one.
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
RING, EP8 = ParallelConfig(cp=4, cp_attention="ring"), ParallelConfig(ep=8)


def layer_figures(config: ModelConfig, fuse: Fuse = plainly, parallel: ParallelConfig = PLAIN) -> dict[str, Figures]:
    """Launches, bytes and FLOPs of one layer's forward and backward passes over a sequence of FULL_LENGTH.

    With ``ep`` or ``cp`` above one, they are those of the last rank; experts are evenly loaded.
    """
    with contextlib.ExitStack() as stack:
        mesh, n_ranks = lone_mesh(GPU), parallel.ep * parallel.cp
        if n_ranks > 1:
            stack.enter_context(as_rank(n_ranks - 1, n_ranks))
            mesh = mesh_of(parallel, n_ranks, n_ranks - 1, GPU)
        deeper = [dataclasses.replace(config, n_layers=n_layers) for n_layers in (1, 2)]
        by_depth = [passes(each, fuse, mesh, parallel) for each in deeper]
    return {name: by_depth[1][name] - by_depth[0][name] for name in by_depth[0]}


def passes(config: ModelConfig, fuse: Fuse, mesh: Mesh, parallel: ParallelConfig) -> dict[str, Figures]:
    """Launches, bytes and FLOPs of a whole model's forward and backward passes over a sequence of FULL_LENGTH."""
    rows = packed_rows(64, 0, [[FULL_LENGTH]])
    batch = cut_micro_batch(
        rows.tokens_BS, rows.tokens_BS, rows.positions_BS, rows.documents_BS, mesh, 1.0, 1.0, has_padding=False
    )
    batch = told_on_host(batch)
    if isinstance(batch.context, HeldContext):
        batch.context.pieces(config.window_of(0), mesh.cp)
    with FakeTensorMode() as mode:
        ignore = lambda parameter, place: None  # noqa: E731 -- nobody adopts
        model = build_part(mesh, config, parallel, torch.bfloat16, ignore, DEFAULT_SIZES, "none", fuse)
        spread_evenly(model, batch, mesh, parallel)
        batch = on_device(batch, mode, GPU)
        forward, back = (Recorder(Regions(), Axes()) for _ in range(2))
        with forward:
            out = model(batch.tokens_BS, batch.context, batch.targets_BS)
        with back:
            torch.autograd.backward(out.loss)
    return {"forward": Figures.of(forward.ops), "backward": Figures.of(back.ops)}


# Micro-batches whose time is traced: the model's number of layers, sequences, positions.
MICRO_BATCHES = {"dense 8B": (16, 1, 8192), "MoE 30B-A3B": (6, 2, 4096)}


def micro_batch_ms(name: str) -> float:
    """The least milliseconds of a micro-batch's passes on an H200, compiled as with train.compile=auto."""
    n_layers, size, seq_len = MICRO_BATCHES[name]
    empty, rates, by_depth = RunConfig(), read_hardware("H200").rates({}), []
    for depth in (1, 2):
        run = dataclasses.replace(
            empty,
            model=dataclasses.replace(LAYERS[name], n_layers=depth),
            data=dataclasses.replace(empty.data, seq_len=seq_len),
            train=dataclasses.replace(empty.train, micro_batch_size=size, precision="bf16"),
        )
        by_depth.append(sum(least_seconds(op, rates)[0] for op in trace_rank(run, 1, 0).ops))
    return 1e3 * (by_depth[0] + (n_layers - 1) * (by_depth[1] - by_depth[0]))


# Layouts in which the listed ranks together compute the products of the whole model for one micro-batch.
WORLDS = {
    "alone": (PLAIN, 1, (0,)),
    "ep2": (ParallelConfig(ep=2), 2, (1,)),
    "pp2": (ParallelConfig(pp=2), 2, (0, 1)),
    "cp4 ring": (RING, 4, (0, 1, 2, 3)),
}


def counted_flops(config: ModelConfig, parallel: ParallelConfig, world_size: int, ranks: tuple[int, ...]) -> Any:
    """[traced, closed form] FLOPs of a micro-batch's products and of attention; and the share of bytes in no part."""
    empty = RunConfig()
    run = dataclasses.replace(
        empty,
        model=config,
        parallel=parallel,
        data=dataclasses.replace(empty.data, seq_len=SEQ_LEN),
        train=dataclasses.replace(empty.train, micro_batch_size=2, precision="bf16"),
    )
    ops = [op for rank in ranks for op in trace_rank(run, world_size, rank).ops]
    tokens = 2 * SEQ_LEN
    scores = 2 * len(config.all_layers) * config.n_heads * (config.qk_head_dim + config.v_head_dim)
    seen = (SEQ_LEN + 1) / 2  # mean keys in a causal kernel, whose backward pass has two and a half times the FLOPs
    products = 3 * 2 * (sum(multiplied_by_layer(config)) + config.vocab_size * config.d_model)
    return {
        "products": [sum(op.work.flops for op in ops if "product" in op.work.kind), tokens * products],
        "scores": [sum(op.work.flops for op in ops if op.work.kind == "attention"), tokens * scores * seen * 3.5],
        "nowhere": sum(op.work.bytes for op in ops if op.part == "other") / sum(op.work.bytes for op in ops),
    }


def main(*, is_whole: bool) -> None:
    """Prints the JSON object."""
    logging.disable(logging.CRITICAL)
    sound = {case.name: case for case in cases()}
    answer: dict[str, Any] = {
        "is_whole": is_whole,
        "cases": {name: problems_of(lambda case=sound[name]: run(case)) for name in (sound if is_whole else FAST)},
        "layers": {
            name + where + suffix: layer_figures(config, fuse, parallel)
            for name, config in LAYERS.items()
            for where, parallel in (("", PLAIN), (", cp 4 by ring", RING) if config.moe is None else (", ep 8", EP8))
            for suffix, fuse in (("", plainly), (", compiled", compiled))
            if is_whole or name + where + suffix in FAST_LAYERS
        },
        "micro_batch_ms": {name: micro_batch_ms(name) for name in MICRO_BATCHES},
        "flops": {
            f"{family} {name}": counted_flops(fitting(example_config(family)), *world)
            for family in ("llama", "qwen3_moe")
            for name, world in WORLDS.items()
            if (family != "llama" or name != "ep2") and (is_whole or name in FAST_WORLDS)
        },
        "faults": {},
    }
    for name, fault in FAULTS.items():
        with planted(name):
            answer["faults"][name] = problems_of(lambda case=sound[fault.case]: run(case))
            if fault.is_slower:
                answer["slower layer"] = layer_figures(LAYERS["dense 8B"])
    print(json.dumps(answer, default=dataclasses.asdict))
