"""Facts about the training systems behind published measurements that rows have no field for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

# all-to-all: each copy of a token is sent to its expert. nodes: as by DeepEP and HybridEP, a token is sent once to each
# node over the network, and once to each rank.
Dispatch = Literal["all-to-all", "nodes"]

# recomputed part -> how rows write it
PARTS = {"norms": r"norm", "activations": r"\bact|moe_act", "up projection": r"up_proj"}


@dataclass(frozen=True, kw_only=True)
class System:
    """How a training system computes. The defaults describe current systems."""

    flash: bool = True  # attention in one kernel; else scores are written to memory
    sequence_parallel: bool = True  # tp divides norms and residual sums, too
    overlaps: bool = True  # gradients are reduced over the replicas during the backward pass
    fused: bool = True  # norms, activations and optimizers in kernels of their own
    fused_sums: bool = True  # gradients are added to their sums where they are computed
    fp32_sums: bool = False  # under ZeRO 3 gradients are summed in 32 bits, as otherwise
    half_sums: bool = False  # gradients are summed and sent in 16 bits
    scatters: bool = True  # hidden states are sharded over tp on their way to the next pipeline position
    buffer_elements: float = 0.0  # 16-bit elements of the buffers for reduction over the replicas
    first_flash: bool = False  # the first FlashAttention, or Triton's version of it
    dispatch: Dispatch = "nodes"
    neighbours: bool = False  # a token's experts are adjacent, as under simulated routing
    hides_dispatch: bool = False  # rows of one micro-batch are sent while another one is computed
    graphed: float = 0.0  # share of a layer's launches, without its experts', that graphs replay; 1: experts', too
    fused_experts: bool = False  # casts and activations of experts are part of their products' kernels
    low_head: bool = False  # the head's products are in 8 bits where others are
    low_attention: bool = False  # attention's products are in 8 bits where others are
    again: frozenset[str] = frozenset()  # parts that are recomputed, beside what the row says
    n_further: int = 0  # modules of multi-token prediction: a layer and the head each


# (part of the row's source, system, why)
SYSTEMS: list[tuple[str, System, str]] = [
    (
        "bigscience",
        System(
            flash=False,
            sequence_parallel=False,
            overlaps=False,
            fused_sums=False,
            scatters=False,
            buffer_elements=3 * 5e8,
        ),
        "Megatron-DeepSpeed of February 2022, before FlashAttention and sequence parallelism; ZeRO 1 after the passes, "
        "two buckets for sums and one for weights at DeepSpeed's default of 500 million elements",
    ),
    (
        "vTrain",
        System(flash=False, sequence_parallel=False, overlaps=False, fused_sums=False),
        "Megatron-LM as of arXiv 2312.12391: no FlashAttention, no sequence parallelism; sums after the passes",
    ),
    ("2401.10241", System(flash=False), "zero bubble's fork of Megatron-LM: its stated memory has room for the scores"),
    (
        "llm-foundry",
        System(fused=False, fused_sums=False, first_flash=True),
        "modules of torch without a compiler; ALiBi in Triton's FlashAttention, before the second version",
    ),
    (
        "dgxc-benchmarking",
        System(half_sums=True),
        "NeMo's recipes for performance set `grad_reduce_in_fp32=False`, and its earlier ones `grad_sync_dtype: bf16`",
    ),
    (
        "megatron-bridge",
        System(half_sums=True),
        "performance recipes set `grad_reduce_in_fp32=False` (scripts/performance/configs, `set_..._common_configs`)",
    ),
]


def system_of(source: str, technique: str = "", changes: Mapping[str, Any] | None = None) -> System:
    """The system of a row's source; for an unknown source, with ``layout.technique``'s word on torch.compile.

    ``changes``: fields that recipes and the row's own words set.
    """
    found = next((system for part, system, _ in SYSTEMS if part.lower() in source.lower()), None)
    if found is None:
        words = technique.lower()
        found = System(fused="compile" in words or "async" in words) if technique else System()
    return replace(found, **changes) if changes else found


def changes_by_words(dispatcher: str, notes: str, recompute: str) -> dict[str, Any]:
    """Fields of System that a row's own words set: dispatch, its overlap, recomputed parts, multi-token prediction."""
    found: dict[str, Any] = {}
    words = dispatcher.lower()
    if re.search(r"\ba2a\b|all-?to-?all", words):
        found["dispatch"] = "all-to-all"
    if "deepep" in words or "hybridep" in words:
        found["dispatch"] = "nodes"
    if re.search(r"\b(ep|a2a|1f1b)\b[\w\s-]*overlap", f"{words} {notes}".lower()):
        found["hides_dispatch"] = True
    further = re.search(r"\b(w/o|w/|with|without) mtp\b", notes.lower())
    if further:
        found["n_further"] = int(further[1] in ("w/", "with"))
    if "fake balanced gate" in notes.lower():
        found["neighbours"] = True
    again = {part for part, sign in PARTS.items() if re.search(sign, recompute.lower())}
    if again:
        found["again"] = frozenset(again)
    return found


def publisher(source: str) -> str:
    """The publisher of a row: a repository or a paper. Rows of one publisher are left out of a fit together."""
    paper = re.match(r"arXiv:?\s*(\d{4}\.\d{4,5})", source, re.IGNORECASE)
    if paper:
        return f"arXiv {paper[1]}"
    words = source.split()
    return words[0].rstrip(",:;") if words else "unknown"
