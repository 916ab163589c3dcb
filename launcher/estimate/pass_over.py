"""Traces one micro-batch forward and backward through a rank's part of the model, at its true size, without memory."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.closed_form.budget import modes_of
from launcher.config.tree import RunConfig
from launcher.estimate.batch import batch_of, on_device
from launcher.estimate.messages import Messages
from launcher.estimate.ranks import as_rank, deterministic, mesh_of
from launcher.trace.ops import Op, Phase
from launcher.trace.parts import Axes
from launcher.trace.recorder import Memory, Recorder
from launcher.trace.regions import Regions
from launcher.training.compiling import fuse_of
from modeling.decoder import Decoder
from modeling.dtypes import DTYPES
from modeling.moe import MoE
from modeling.precision import products_of
from parallel.apply import build_part
from parallel.batch import MicroBatch
from parallel.collectives import Watch
from parallel.config import ParallelConfig
from parallel.expert import RowSizes, make_dispatch
from parallel.mesh import Mesh
from parallel.offload import AtOnce
from parallel.sizes import DEFAULT_SIZES
from parallel.zero.ways import sharding_for

GPU = torch.device("cuda", 0)


@dataclass
class Traced:
    """The operations of one micro-batch on one rank, and its tensors' memory: weights, activations, gradients."""

    ops: list[Op]
    memory: Memory
    mesh: Mesh
    host_bytes: Mapping[Phase, int]  # activations copied to the host or back in each phase, beside the operations
    # places in ops of each message that runs beside operations, and of the operation before which it is waited for
    waits: list[tuple[int, int]] = field(default_factory=list)


def trace_rank(
    config: RunConfig, world_size: int, rank: int, clock: Callable[[Op | None], float] | None = None
) -> Traced:
    """The operations and memory of one micro-batch on a rank, with experts evenly loaded.

    The device must be open (launcher.estimate.device). ``clock`` gives the time after each operation, as for Recorder.
    """
    with contextlib.ExitStack() as stack:
        if world_size > 1:
            stack.enter_context(as_rank(rank, world_size))
        stack.enter_context(deterministic(config.train.deterministic))
        mesh = mesh_of(config.parallel, world_size, rank, GPU)
        batch = batch_of(config, mesh)
        mode = stack.enter_context(FakeTensorMode())
        dtype = DTYPES[config.train.stored]
        adopt = lambda parameter, place: None  # noqa: E731 -- there is no engine that takes over parameters
        train, fuse = config.train, fuse_of(config.train.compile, GPU.type)
        stay = sharding_for(config.parallel, train.stored).weights_stay
        products = products_of(train.precision, fuse, keeps_weights=train.fp8_keep_weights)
        ways = (modes_of(config, world_size), fuse, products)
        made_of = (config.model, config.parallel, dtype, adopt, DEFAULT_SIZES, *ways)
        model = build_part(mesh, *made_of, weights_stay=stay, copies=AtOnce() if train.offload_activations else None)
        messages = Messages()
        spread_evenly(model, batch, mesh, config.parallel, messages.watch)
        batch = on_device(batch, mode, GPU)
        inputs = inputs_of(model, batch, config.model.d_model, dtype)
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(take_gradient)
        if train.fp8_keep_weights:  # a step's first micro-batch, which casts weights to 8 bits, is not the recorded one
            there_and_back(model, batch, inputs)
            messages.waits.clear()
        regions = stack.enter_context(Regions().of(model))
        held = {"weights": [*model.parameters(), *products.kept()]}
        recorder = Recorder(regions, Axes(has_tp=mesh.tp.degree > 1), clock, held, GPU.type)
        messages.ops = recorder.ops
        with recorder:
            there_and_back(model, batch, inputs)
        return Traced(recorder.ops, recorder.finish(), mesh, recorder.host_bytes, messages.waits)


def inputs_of(model: Decoder, batch: MicroBatch, d_model: int, dtype: torch.dtype) -> Tensor:
    """The inputs of this part of the decoder: tokens, or the hidden states that another stage sent."""
    if model.embed is not None and model.takes_tokens:
        return batch.tokens_BS
    model.takes_tokens = False
    part = batch.context.between_layers.positions_BS.shape
    return torch.empty(*part, d_model, dtype=dtype, device=GPU, requires_grad=True)


def there_and_back(model: Decoder, batch: MicroBatch, inputs: Tensor) -> None:
    """Runs a micro-batch's forward and backward pass through this part of the decoder."""
    has_head = model.head is not None
    out = model(inputs, batch.context, batch.targets_BS if has_head else None, ahead=batch.ahead if has_head else ())
    end = out.loss if has_head else out.hidden_BSD
    assert end is not None
    torch.autograd.backward(end, None if has_head else torch.empty_like(end))


def take_gradient(weight: Tensor) -> None:
    """Drops a weight's gradient as soon as it is whole, when ZeRO would add it to its own sums."""
    weight.grad = None


def spread_evenly(
    model: Decoder, batch: MicroBatch, mesh: Mesh, parallel: ParallelConfig, watch: Watch | None = None
) -> None:
    """Makes each ep rank send the same number of rows to every other, since routers' choices have no values here."""
    if mesh.ep.degree == 1:
        return
    n_tokens = batch.context.between_layers.positions_BS.numel()
    for name in model.layers:
        moe = model.layer_of(name).feed_forward
        if isinstance(moe, MoE):
            rows = even(n_tokens * moe.router.top_k)
            moe.sender.dispatch = make_dispatch(
                mesh.ep,
                DEFAULT_SIZES.row_multiple,
                rows,
                overlap=parallel.ep_overlap,
                chunks=parallel.ep_chunks,
                watch=watch,
            )


def even(n_rows: int) -> RowSizes:
    """A function that gives expert dispatch its row counts: ``n_rows`` sent and as many received, evenly divided."""

    def sizes(counts_E: Tensor, theirs_NE: Tensor, parts: list[int]) -> list[list[list[int]]]:
        rows = [evenly(each, len(theirs_NE)) for each in shares(n_rows, parts)]
        return [rows, rows]

    return sizes


def shares(n_rows: int, parts: Sequence[int]) -> list[int]:
    """The rows of each chunk of experts, of ``n_rows`` dealt evenly to experts; ``parts`` are the chunks' experts."""
    ends = [n_rows * sum(parts[: number + 1]) // sum(parts) for number in range(len(parts))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def evenly(n_rows: int, n_ranks: int) -> list[int]:
    """``n_rows`` divided among the ranks into parts that differ by one at most."""
    return [n_rows // n_ranks + (rank < n_rows % n_ranks) for rank in range(n_ranks)]
