"""Times a MoE layer on a CPU beside a dense SwiGLU of its active width, in processor time. Prints one JSON line.

    python benchmarks/moe_layer.py [--steps 4] [--starts 3] [--turns 5] [--precision fp32|bf16|auto]

Forward and backward over 4096 tokens of d_model 384, one thread: 16 experts of width 192, 4 a token, and 64
experts of width 64, 12 a token; both dense layers are 768 wide. The MoE layer includes the router, its balance loss and
its counts, but no shared expert. Hidden states are drawn anew each step, so routing changes, too. Each layer is a
process of its own, which runs some steps when its turn comes, and is started anew after some turns; figures are medians
over steps, then over all turns, and ratios medians of the turns'.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from cpu_precision import add_precision, choose_precision
from modeling.context import Context
from modeling.dtypes import DTYPES
from modeling.feed_forward import FeedForward
from modeling.moe import build_moe
from modeling.moe_config import MoEConfig
from sides import in_turn, takes_turns

BATCH, SEQ_LEN, D_MODEL = 8, 512, 384
SIZES = {"16 x 192": (16, 192, 4), "64 x 64": (64, 64, 12)}  # experts, width, experts a token
KINDS = ("moe", "dense")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--side", nargs=2, metavar=("SIZE", "KIND"))
    add_precision(parser)
    arguments = parser.parse_args()
    if arguments.side is not None:
        takes_turns(steps_of(*arguments.side, arguments.steps, arguments.precision))
        return
    chosen = choose_precision(arguments.precision)
    options = ["--steps", str(arguments.steps), "--precision", str(chosen["precision"])]
    line: dict[str, object] = {"benchmark": "moe_layer", "torch": torch.__version__, **chosen}
    for size in SIZES:
        sides = [(size, kind) for kind in KINDS]
        times = in_turn(__file__, sides, options, arguments.starts, arguments.turns)
        moe, dense = times.values()
        line[size] = {
            "moe_ms": round(median(moe), 1),
            "dense_ms": round(median(dense), 1),
            "ratio": round(median(of_moe / of_dense for of_moe, of_dense in zip(moe, dense, strict=True)), 3),
        }
    print(json.dumps(line))


def steps_of(size: str, kind: str, n_steps: int, precision: str) -> Callable[[], float]:
    """A function that runs ``n_steps`` passes forward and backward and returns their median ms of processor time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = DTYPES[precision]
    layer, forward = build(size, kind, dtype)

    def step() -> float:
        hidden_BSD, grad_BSD = (torch.randn(BATCH, SEQ_LEN, D_MODEL).to(dtype) for _ in range(2))
        hidden_BSD.requires_grad_()
        start = time.process_time()
        forward(hidden_BSD).backward(grad_BSD)
        milliseconds = (time.process_time() - start) * 1e3
        layer.zero_grad()
        return milliseconds

    return lambda: median(step() for _ in range(n_steps))


def build(size: str, kind: str, dtype: torch.dtype) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The layer, and its forward function, which returns only the hidden states."""
    n_experts, d_ff, top_k = SIZES[size]
    layer: nn.Module
    if kind == "dense":
        layer = FeedForward(D_MODEL, top_k * d_ff)
        forward = layer.forward
    else:
        moe = build_moe(MoEConfig(n_experts=n_experts, top_k=top_k, d_ff=d_ff, score="softmax"), D_MODEL)
        places_BS = torch.arange(SEQ_LEN).repeat(BATCH, 1)
        context = Context(places_BS, torch.zeros_like(places_BS), balance_scale=1 / BATCH)
        layer, forward = moe, lambda hidden_BSD: moe(hidden_BSD, context, 0)[0]
    for weight in layer.parameters():
        nn.init.normal_(weight.data, std=0.02)
    return layer.to(dtype), forward


if __name__ == "__main__":
    main()
