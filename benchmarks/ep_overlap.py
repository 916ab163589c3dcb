"""Shows the effect of `parallel.ep_overlap` and `ep_chunks`, measured on two gloo processes or traced for an H200.

    python benchmarks/ep_overlap.py [--steps 20] [--precision fp32|bf16|auto] [--traced]

Prints one JSON line. Measured: milliseconds of wall and of processor time, forward and backward, of a MoE layer with
a shared expert over 4096 tokens of d_model 384 a process, in the precision shown: overlap off, on, and on with 2 and
with 4 chunks, alternately within the same processes, each first equally often; medians of rank 0. There the exchange is
work of the same processors. Traced: for one rank of ep 8, within a node, and of ep 64, over eight nodes, a layer of
DeepSeek-V3's shape at an H200's published rates, in milliseconds of a micro-batch: the time of its messages, the part
of it that is waited for, and the whole, as the estimate counts them. The traced figures are not measurements.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from cpu_precision import add_precision, choose_precision

BATCH, SEQ_LEN, D_MODEL = 8, 512, 384
MODEL = Path(__file__).parents[1] / "configs/models/deepseek-v3.yaml"
OVERRIDES = [
    *("model.n_layers=2", "model.moe.n_dense_layers=1", "data.seq_len=4096", "train.micro_batch_size=1"),
    *("train.precision=bf16", "train.recompute=none", "train.global_batch_size=64"),
]
WAYS = {"off": "ep_overlap: false", "on": "ep_chunks: 1", **{f"{n} chunks": f"ep_chunks: {n}" for n in (2, 4, 8)}}
FIGURES = ("messages_ms", "waited_for_ms", "micro_batch_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    add_precision(parser)
    parser.add_argument("--traced", action="store_true")
    arguments = parser.parse_args()
    if arguments.traced:
        print(json.dumps({"benchmark": "ep_overlap traced", **traced()}))
        return
    from parallel.processes.start import run_ranks

    chosen = choose_precision(arguments.precision)
    found = run_ranks(measure, 2, arguments.steps, chosen["precision"], timeout_seconds=500, threads=1)[0]
    print(json.dumps({"benchmark": "ep_overlap", **chosen, **found}))


def measure(steps: int, precision: str) -> dict[str, float]:
    """The milliseconds of each way on this process. All ranks call it."""
    import torch

    from in_turn import time_in_turn
    from modeling.context import Context
    from modeling.dtypes import DTYPES
    from modeling.moe import MoE, build_moe
    from modeling.moe_config import MoEConfig
    from parallel.apply import connect_experts
    from parallel.config import ParallelConfig
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(ParallelConfig(ep=2), 240)
    torch.manual_seed(mesh.rank)

    def built(overlap: bool, chunks: int) -> MoE:
        moe = build_moe(MoEConfig(n_experts=16, top_k=4, d_ff=192, n_shared_experts=2), D_MODEL)
        for name in ("gate", "up", "down"):
            held = getattr(moe.experts, name)[: 16 // mesh.ep.degree]
            setattr(moe.experts, name, torch.nn.Parameter(held.detach().clone()))
        for weight in moe.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        connect_experts(moe, mesh, None, overlap=overlap, chunks=chunks, weights_stay=True)
        return moe.to(DTYPES[precision])

    positions_BS = torch.arange(SEQ_LEN).expand(BATCH, SEQ_LEN)
    context = Context(torch.zeros(BATCH, SEQ_LEN, dtype=torch.int32), positions_BS, balance_scale=0.1, z_scale=0.1)
    layers = {"off": built(False, 1), "on": built(True, 1), "2 chunks": built(True, 2), "4 chunks": built(True, 4)}
    ways = {name: lambda hidden_BSD, moe=moe: moe(hidden_BSD, context, 0)[0] for name, moe in layers.items()}
    found = time_in_turn(ways, lambda: torch.randn(BATCH, SEQ_LEN, D_MODEL).to(DTYPES[precision]), steps)
    close_mesh()
    return found


def traced() -> dict[str, Any]:
    """For each way, milliseconds of one micro-batch: of all messages, of those waited for, and of everything."""
    from launcher.estimate.device import open_device

    open_device()
    from launcher.config.load import load_config
    from launcher.estimate.messages import hide
    from launcher.estimate.pass_over import trace_rank
    from launcher.estimate.step import near
    from launcher.trace.hardware import read_hardware
    from launcher.trace.roofline import least_seconds
    from parallel.mesh import Degrees

    found: dict[str, Any] = {}
    for ep, (name, ways) in itertools.product((8, 64), WAYS.items()):
        if ep == 64 and name == "8 chunks":  # a rank has four experts
            continue
        config = load_config(MODEL, [*OVERRIDES, f"parallel={{ep: {ep}, {ways}}}"])
        rates = read_hardware("H200").rates(near(Degrees.of(config.parallel, ep), 0, n_per_node=8))
        rank = trace_rank(config, ep, 0)
        seconds = [
            sum(least_seconds(op, rates)[0] for op in ops) for ops in (rank.ops, hide(rank.ops, rank.waits, rates))
        ]
        sent = sum(least_seconds(op, rates)[0] for op in rank.ops if op.part == "communication: ep")
        waited = sent - (seconds[0] - seconds[1])
        found[f"ep {ep}, {name}"] = {
            key: round(1e3 * value, 2) for key, value in zip(FIGURES, (sent, waited, seconds[1]), strict=True)
        }
    return {"layers": config.model.n_layers - 1, **found}


if __name__ == "__main__":
    main()
