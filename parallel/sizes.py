"""Sizes of the pieces in which work is computed or tensors are sent; they change memory and speed, not results."""

from dataclasses import dataclass

from modeling.kernels.by_rows import PIECE_BYTES
from modeling.kernels.gated_delta import CHUNK
from modeling.optimizers.matrices import AT_ONCE
from modeling.pieces import QUERY_BLOCK
from parallel.context_parallel.plan import TILE


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes chosen for memory and speed. No result depends on them beyond rounding, so they are no part of the config.

    The small model of a proof (``launcher.prove``) would stay below all of these, so a proof passes smaller ones, by
    which every way of computing is taken.
    """

    # Logits that exist at once; the loss goes through the tokens in such chunks. None: what is fast on the device.
    chunk_logits: int | None = None
    query_block: int = QUERY_BLOCK  # queries of one kernel call of attention on CPUs, where no ring is
    delta_chunk: int = CHUNK  # tokens of linear attention that one triangular system solves
    ring_tile: int = TILE  # queries, and keys, of one kernel call of ring attention
    # Of so many attention layers, the last goes around the ring by pieces of documents, as all do where FlashAttention
    # computes them, and by these pieces' formula. None: where FlashAttention cannot, all go by tiles.
    ring_pieces_every: int | None = None
    row_piece_bytes: int = PIECE_BYTES  # of the largest tensor of a chain of elementwise work on CPUs, computed at once
    row_multiple: int | None = None  # an expert's rows are rounded up to it; None: what is fast there, in that dtype
    matrices: int = AT_ONCE  # elements of matrices that are whole at once, of an update that needs them so (Muon)
    staging_bytes: int = 8 << 20  # the extra memory of a synchronous save, which goes through it
    # Activations on the host: in pages of a power of two; smaller tensors stay on the device.
    page_bytes: int = 32 << 20
    least_offloaded_bytes: int = 1 << 20
    # DeepSpeed's sizes and its own defaults, except `reduced`, which is Roundtable's. All are in elements.
    bucket: int = 500_000_000  # gradients reduced by one collective, and updated weights gathered by one (ZeRO 0 to 2)
    # gradients reduced by one collective during a backward pass (parallel.grad_reduce); Megatron's default
    reduced: int = 40_000_000
    persistent: int = 100_000  # ZeRO 3 keeps weights of at most so many whole, between steps too
    prefetched: int = 50_000_000  # ZeRO 3 gathers so many ahead of their use
    live: int = 1_000_000_000  # ZeRO 3 holds at most so many whole at once
    reused: int = 1_000_000_000  # and keeps gathered weights whose next use is no more than so many away
    updated: int = 1_000_000_000  # ZeRO 3's optimizer groups are cut into groups of so many


DEFAULT_SIZES = Sizes()
