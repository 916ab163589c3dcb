"""Builds this rank's part of the model, cut and connected to the other ranks as the mesh says, in a written order."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from modeling.attention import Attention
from modeling.config import ModelConfig
from modeling.decoder import Decoder
from modeling.fused import fuse_chains
from modeling.init import fill
from modeling.kernels.attention import attend
from modeling.kernels.experts import experts_grouped
from modeling.kernels.fuse import Fuse, plainly
from modeling.kernels.gated_delta import RuleSizes
from modeling.kernels.products import AS_THEY_ARE, Products
from modeling.kernels.varlen import PLAIN
from modeling.linear_attention import LinearAttention, mix
from modeling.logical import whole_decoder
from modeling.loss import Head
from modeling.moe import MoE, staying
from modeling.precision import multiply_by
from parallel.collectives import sum_forward
from parallel.config import ParallelConfig
from parallel.context_parallel.core import make_core, make_linear_core
from parallel.expert import make_dispatch
from parallel.layout import Layout, Place, layout_of
from parallel.mesh import Mesh
from parallel.offload import Copies, offloader_of
from parallel.pipeline.stages import keep_parts, rank_parts
from parallel.recompute import Modes, Recompute, apply_recompute
from parallel.sizes import Sizes
from parallel.tensor import apply_tensor_parallelism
from parallel.tensor_overlap import overlap_sums


def build_part(
    mesh: Mesh,
    config: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    adopt: Callable[[nn.Parameter, Place], None],
    sizes: Sizes,
    recompute: Recompute | Modes,
    fuse: Fuse = plainly,
    products: Products = AS_THEY_ARE,
    *,
    weights_stay: bool = True,
    copies: Copies | None = None,
) -> Decoder:
    """This rank's part of the decoder, with all weights zero. All ranks call it.

    1. The whole model is built on the meta device, and this rank's pipeline stages are kept. 2. Weights are cut by the
    layout table and allocated one by one; ``adopt`` takes each at once (ZeRO 3 partitions it there). 3. ``products``
    sets how layers multiply by their weights. 4. Tensor parallelism. 5. The attention core, which communicates under
    context parallelism. 6. The expert dispatch, and sums over the ranks that share sequences. 7. ``fuse`` sets how
    chains of elementwise work are computed. 8. Recomputation. ``sizes`` says how much of 4. to 6. is computed at once.
    ``weights_stay``: weights stay in memory from the forward to the backward pass (not under ZeRO 3). ``copies``: how
    saved activations are copied to the host and back; None: they stay on the device.
    """
    model = whole_decoder(config)
    keep_parts(model, rank_parts(config, parallel.pipeline, mesh.pp.degree, mesh.pp.rank))
    make_weights(model, layout_of(config), mesh, dtype, adopt)
    multiply_by(model, products)
    if mesh.tp.degree > 1:
        apply_tensor_parallelism(model, mesh.tp)
        if parallel.tp_overlap:
            overlap_sums(model, mesh.tp)
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    for number, attention in enumerate(attentions, start=1):
        attention.core = partial(attend, block=sizes.query_block)
        if mesh.cp.degree > 1:
            is_by_pieces = sizes.ring_pieces_every is not None and number % sizes.ring_pieces_every == 0
            blocks = (sizes.ring_tile, sizes.query_block, PLAIN if is_by_pieces else None)
            attention.core = make_core(parallel.cp_attention, mesh.cp, *blocks)
    for module in model.modules():
        if isinstance(module, LinearAttention):
            cut = RuleSizes(sizes.delta_chunk, sizes.row_piece_bytes)
            module.core = make_linear_core(mesh.cp, cut) if mesh.cp.degree > 1 else partial(mix, sizes=cut)
        if isinstance(module, MoE):
            connect_experts(
                module,
                mesh,
                sizes.row_multiple,
                overlap=parallel.ep_overlap,
                chunks=parallel.ep_chunks,
                weights_stay=weights_stay,
            )
        if isinstance(module, Head):
            module.chunk_logits = sizes.chunk_logits
    fuse_chains(model, fuse)
    offloader = None if copies is None else offloader_of(model, copies, sizes)
    apply_recompute(model, recompute, weights_stay=weights_stay, offloader=offloader)
    return model


def make_weights(
    model: Decoder, layout: Layout, mesh: Mesh, dtype: torch.dtype, adopt: Callable[[nn.Parameter, Place], None]
) -> None:
    """Replaces each meta weight by zeros in the shape that this rank holds, and passes each to ``adopt`` at once."""

    def zeros(name: str, shape: torch.Size) -> nn.Parameter:
        place = layout[name]
        parameter = nn.Parameter(torch.zeros(place.held_box(mesh).shape, dtype=dtype, device=mesh.device))
        adopt(parameter, place)
        return parameter

    fill(model, zeros, mesh.device)


def connect_experts(
    moe: MoE, mesh: Mesh, row_multiple: int | None, *, overlap: bool, chunks: int = 1, weights_stay: bool
) -> None:
    """Gives ``moe`` its dispatch over ep, and sums of balance losses over the ranks that share sequences (tp, cp).

    ``overlap``: the shared expert is computed while tokens travel. Not under ZeRO 3 (``weights_stay`` is False): there
    it stays the last part of a layer, so that its weights, gathered last in the forward pass, are still in memory when
    recomputation begins. ``chunks``: the number of parts into which a rank's experts are cut. ``row_multiple``: an
    expert's rows are padded to a multiple of it; None: what is fast on the device.
    """
    if mesh.ep.degree > 1:
        moe.sender.dispatch = make_dispatch(mesh.ep, row_multiple, overlap=overlap, chunks=chunks)
        if overlap and weights_stay:
            moe.compute_shared_early()
    else:
        moe.sender.dispatch = staying(partial(experts_grouped, row_multiple=row_multiple))
    moe.add_sequence_sums = lambda sums_BX: sum_forward(sum_forward(sums_BX, mesh.tp), mesh.cp)
