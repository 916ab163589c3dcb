"""What the code behind published measurements does: facts about each system that its rows have no field for."""

import re
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class System:
    """How a training system computes. The defaults are what present ones do."""

    flash: bool = True  # attention in one kernel; else scores are written to memory
    sequence_parallel: bool = True  # tp divides norms and residual sums, too
    overlaps: bool = True  # sums over the replicas run beside the backward pass
    fused: bool = True  # norms, activations and optimizers in kernels of their own
    fused_sums: bool = True  # gradients are added to their sums where they are computed
    fp32_sums: bool = False  # under ZeRO 3 gradients are summed in 32 bits, as otherwise
    scatters: bool = True  # what goes to the next pipeline position is cut over tp for the journey
    buffer_elements: float = 0.0  # of 16 bits, that sums over the replicas go through
    balances: bool = False  # the last position has fewer layers, for the head's sake, where pp divides them, too
    graphs: bool = False  # passes are replayed as a whole, and casts are part of other kernels: no time between kernels
    first_flash: bool = False  # the first FlashAttention, or Triton's version of it


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
]


# Not documented but seen in a publisher's own rows, whose error is therefore told without it: (part of the source and
# table, versions from and before, changes, what was seen).
INFERRED: list[tuple[str, str, str, dict[str, Any], str]] = [
    (
        "megatron-bridge",
        "26.06",
        "99",
        {"graphs": True},
        "MoE steps of one layout are 25 to 35% shorter with container 26.06, as if all launches and casts had gone",
    ),
]


def system_of(source: str, technique: str = "", table: str = "", *, inferred: bool = True) -> System:
    """The system of a source, with what the row's ``layout.technique`` says of torch.compile.

    ``inferred``: with what only the publisher's own rows tell.
    """
    found = next((system for part, system, _ in SYSTEMS if part.lower() in source.lower()), None)
    if found is None:
        words = technique.lower()
        found = System(fused="compile" in words or "async" in words) if technique else System()
    version = re.search(r"\b(\d\d\.\d\d)", table)
    for part, first, last, changes, _ in INFERRED if inferred and version else ():
        assert version is not None
        if part in source.lower() and first <= version[1] < last:
            found = replace(found, **changes)
    return found


def publisher(source: str) -> str:
    """Who published a row: the repository, or the paper. Rows of one publisher are left out of a fit together."""
    paper = re.match(r"arXiv:?\s*(\d{4}\.\d{4,5})", source, re.IGNORECASE)
    if paper:
        return f"arXiv {paper[1]}"
    words = source.split()
    return words[0].rstrip(",:;") if words else "unknown"
