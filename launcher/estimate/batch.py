"""A micro-batch of real shapes on a fake CUDA device, for tracing."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.config.tree import RunConfig
from modeling.dropout import Draws
from parallel.batch import MicroBatch, cut_micro_batch
from parallel.context_parallel.context import HeldContext
from parallel.context_parallel.plan import plan_ring
from parallel.mesh import Mesh
from parallel.sizes import DEFAULT_SIZES


def batch_of(config: RunConfig, mesh: Mesh) -> MicroBatch:
    """This rank's part of one micro-batch, on the host: zero tokens, and one document in each sequence.

    What attention derives from documents and positions is computed already, since that needs values.
    """
    shape = (config.train.micro_batch_size, config.data.seq_len)
    tokens_BS = torch.zeros(shape, dtype=torch.int64)
    positions_BS = torch.arange(shape[1], dtype=torch.int32).expand(shape).contiguous()
    documents_BS = torch.zeros(shape, dtype=torch.int32)
    draws = None
    if config.model.has_dropout:
        draws = Draws(config.seed, 1, torch.arange(shape[0]), torch.arange(shape[1]))
    ahead = [1.0] * config.model.mtp.depth if config.model.mtp is not None else []
    rows = (tokens_BS, tokens_BS.clone(), positions_BS, documents_BS)
    batch = cut_micro_batch(*rows, mesh, 1.0, 1.0, has_padding=False, draws=draws, ahead_scales=ahead)
    told = told_on_host(batch)
    if config.parallel.cp > 1 and config.parallel.cp_attention == "ring":
        plan_on_host(config, told, mesh)
    return told


def told_on_host(batch: MicroBatch) -> MicroBatch:
    """The same batch, after its contexts have computed bounds and masks, which need values, as ``Context.to`` does."""
    for context in (batch.context, getattr(batch.context, "whole", None), batch.context.part):
        if context is not None:
            _ = context.bounds, context.cu_seqlens, context.valid_T
    return batch


def plan_on_host(config: RunConfig, batch: MicroBatch, mesh: Mesh) -> None:
    """Adds ring attention's plans for each window, by tiles and by pieces, which have to be made from real values."""
    context = batch.context
    assert isinstance(context, HeldContext)
    for window in {config.model.window_of(layer) for layer in config.model.all_layers}:
        context.plans[window] = plan_ring(context.whole, window, mesh.cp, DEFAULT_SIZES.ring_tile)
        context.pieces(window, mesh.cp)


def on_device(batch: MicroBatch, mode: FakeTensorMode, device: torch.device) -> MicroBatch:
    """The same batch with every tensor fake and on ``device``. The batch's dataclasses are changed in place."""

    def faked(each: Any) -> Any:
        if isinstance(each, Tensor):
            return mode.from_tensor(each).to(device)
        if isinstance(each, tuple | list):
            return type(each)(map(faked, each))
        if isinstance(each, dict):
            return {key: faked(value) for key, value in each.items()}
        if dataclasses.is_dataclass(each) and not isinstance(each, type):
            vars(each).update({key: faked(value) for key, value in vars(each).items()})
        return each

    return faked(batch)
