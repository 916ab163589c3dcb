"""Times attention over packed documents on a CPU, by their number and lengths. Prints one JSON line.

    python benchmarks/attention_documents.py [--rows 8] [--rounds 3] [--precision fp32|bf16|auto]

Forward and backward of attention alone, one thread, in rows of SEQ_LEN tokens cut into documents. Each cut is timed
with ``attend``, which works document by document, and with one mask of the whole rows (``masked_attention``),
alternately; the figures are medians of processor time. Rows are cut at different places, so that each row needs its own
calls. Runs in fp32, and where the precision is bf16 in both.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from cpu_precision import add_precision, choose_precision
from modeling.context import Context
from modeling.kernels.attention import attend, masked_attention

SEQ_LEN, N_HEADS, N_KV_HEADS, D_HEAD = 512, 6, 2, 64
MEAN_LENGTHS = (512, 256, 128, 64, 32, 16)
WINDOW = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    add_precision(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = choose_precision(arguments.precision)
    dtypes = (torch.float32, torch.bfloat16) if chosen["precision"] == "bf16" else (torch.float32,)
    cases = [
        case(mean, window, dtype, arguments.rows, arguments.rounds)
        for dtype in dtypes
        for mean in MEAN_LENGTHS
        for window in (None, WINDOW)
    ]
    about = {"machine": platform.machine(), "torch": torch.__version__, "rows": arguments.rows, "seq_len": SEQ_LEN}
    print(json.dumps({"benchmark": "attention_documents", **about, **chosen, "cases": cases}))


def case(mean: int, window: int | None, dtype: torch.dtype, n_rows: int, rounds: int) -> dict[str, object]:
    """One cut's milliseconds by both ways, and the fraction of all query-key pairs that attention sees."""
    context = cut_rows(mean, n_rows)
    mask_BSS = context.mask_BSS(window)
    tensors = heads(n_rows, dtype)
    ways = {
        "by_document": lambda: attend(*tensors, context, window),
        "by_mask": lambda: masked_attention(*tensors, mask_BSS),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name, attention in ways.items():
            spent = milliseconds(attention)
            if round_number:  # the first one warms up
                times[name].append(spent)
    return {
        "mean_length": mean,
        "window": window,
        "dtype": str(dtype).removeprefix("torch."),
        "documents": len(context.cu_seqlens[0]) - 1,
        "seen": round(float(mask_BSS.float().mean()), 4),
        **{f"{name}_ms": round(median(spent), 1) for name, spent in times.items()},
    }


def cut_rows(mean: int, n_rows: int) -> Context:
    """Rows of documents whose lengths are drawn around ``mean``; one document a row where that is the row's length."""
    generator = torch.Generator().manual_seed(mean)
    rows = []
    for _ in range(n_rows):
        lengths: list[int] = []
        while sum(lengths) < SEQ_LEN:
            drawn = int(torch.randint(mean // 2, mean + mean // 2 + 1, (), generator=generator))
            lengths.append(min(drawn if mean < SEQ_LEN else mean, SEQ_LEN - sum(lengths)))
        rows.append(lengths)
    positions_BS = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    documents_BS = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    return Context(positions_BS, documents_BS)


def heads(n_rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Random queries, keys and values that require gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(n_rows, SEQ_LEN, n_heads, D_HEAD) for n_heads in (N_HEADS, N_KV_HEADS, N_KV_HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def milliseconds(attention: Callable[[], Tensor]) -> float:
    """Processor time of one forward and backward pass."""
    start = time.process_time()
    out = attention()
    out.backward(torch.ones_like(out))
    return (time.process_time() - start) * 1e3


if __name__ == "__main__":
    main()
