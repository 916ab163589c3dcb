"""What `parallel.ep_overlap` hides: a layer on two gloo processes, and a traced micro-batch at an H200's stated rates.

    python benchmarks/ep_overlap.py [--steps 20] [--traced]

Prints one JSON line. Measured: milliseconds of wall and of processor time, forward and backward, of a MoE layer with
a shared expert over 4096 tokens of d_model 384 in bf16 a process, on and off in turn within the same processes;
medians of rank 0; each is the first one every second time. There the exchange is work of the same processors. Traced:
for one rank of ep 8 and a layer of DeepSeek-V3's shape, what its exchanges take and what is computed while each is
under way, both as the estimate counts them; the smaller one can be hidden. That is no measurement.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

BATCH, SEQ_LEN, D_MODEL = 8, 512, 384
WARM_UP = 3
MODEL = Path(__file__).parents[1] / "configs/models/deepseek-v3.yaml"
OVERRIDES = [
    *("model.n_layers=2", "model.moe.n_dense_layers=1", "data.seq_len=4096", "train.micro_batch_size=1"),
    *("train.precision=bf16", "train.recompute=none", "train.global_batch_size=8", "parallel={ep: 8}"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--traced", action="store_true")
    arguments = parser.parse_args()
    if arguments.traced:
        print(json.dumps({"benchmark": "ep_overlap traced", **traced()}))
        return
    from parallel.processes.start import run_ranks

    found = run_ranks(measure, 2, arguments.steps, timeout_seconds=500, threads=1)[0]
    print(json.dumps({"benchmark": "ep_overlap", **found}))


def measure(steps: int) -> dict[str, float]:
    """Of one process: milliseconds with and without."""
    import torch

    from modeling.config import MoEConfig
    from modeling.context import Context
    from modeling.moe import MoE, build_moe
    from parallel.apply import connect_experts
    from parallel.config import ParallelConfig
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(ParallelConfig(ep=2), 240)
    torch.manual_seed(mesh.rank)

    def built(overlap: bool) -> MoE:
        moe = build_moe(MoEConfig(n_experts=16, top_k=4, d_ff=192, n_shared_experts=2), D_MODEL)
        for name in ("gate", "up", "down"):
            held = getattr(moe.experts, name)[: 16 // mesh.ep.degree]
            setattr(moe.experts, name, torch.nn.Parameter(held.detach().clone()))
        for weight in moe.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        connect_experts(moe, mesh, None, overlap=overlap, weights_stay=True)
        return moe.bfloat16()

    positions_BS = torch.arange(SEQ_LEN).expand(BATCH, SEQ_LEN)
    context = Context(torch.zeros(BATCH, SEQ_LEN, dtype=torch.int32), positions_BS, balance_scale=0.1, z_scale=0.1)
    layers = {"on": built(True), "off": built(False)}
    times: dict[str, list[float]] = {name + of: [] for name in layers for of in ("", ", processor")}
    for step in range(WARM_UP + steps):
        hidden_BSD = torch.randn(BATCH, SEQ_LEN, D_MODEL).bfloat16().requires_grad_()
        for name, moe in sorted(layers.items(), reverse=step % 2 == 1):  # which one is first pays for new memory
            torch.distributed.barrier()
            started, busy = time.perf_counter(), time.process_time()
            out_BSD, _ = moe(hidden_BSD, context, 0)
            out_BSD.backward(hidden_BSD.detach())
            times[name].append(1e3 * (time.perf_counter() - started))
            times[f"{name}, processor"].append(1e3 * (time.process_time() - busy))
    close_mesh()
    return {name: round(median(each[WARM_UP:]), 1) for name, each in times.items()}


def traced() -> dict[str, Any]:
    """Milliseconds of one micro-batch: what the exchanges take, and the least that is computed beside each."""
    from launcher.estimate.device import open_device

    open_device()
    from launcher.config.load import load_config
    from launcher.estimate.pass_over import trace_rank
    from launcher.estimate.step import near
    from launcher.trace.hardware import read_hardware
    from launcher.trace.ops import Op
    from launcher.trace.roofline import least_seconds
    from parallel.collectives import RowExchange
    from parallel.mesh import Degrees
    from parallel.zero.patches import replaced

    config = load_config(MODEL, OVERRIDES)
    rates = read_hardware("H200").rates(near(Degrees.of(config.parallel, 8), 0, n_per_node=8))
    now, sent, found = [0.0], [0.0], []

    def clock(op: Op | None) -> float:
        seconds = 0.0 if op is None else least_seconds(op, rates)[0]
        now[0] += seconds
        if op is not None and op.work.collective == "all-to-all":
            sent[0] = seconds
        return now[0]

    begun: list[tuple[float, float]] = []
    start, wait = RowExchange.start, RowExchange.wait

    def starting(self: RowExchange, *arguments: Any) -> Any:
        made = start(self, *arguments)
        begun.append((now[0], sent[0]))
        return made

    def waiting(self: RowExchange) -> Any:
        at, seconds = begun.pop()
        found.append({"sends": round(1e3 * seconds, 3), "beside it": round(1e3 * (now[0] - at), 3)})
        return wait(self)

    with replaced(RowExchange, start=starting, wait=waiting):
        trace_rank(config, 8, 0, clock)
    names = ("forward", "backward")
    return {
        "micro_batch_ms": round(1e3 * now[0], 2),
        "layers": config.model.n_layers - 1,
        **dict(zip(names, found, strict=True)),
    }


if __name__ == "__main__":
    main()
