"""Shows the effect of `parallel.tp_overlap`, measured on two gloo processes or traced for an H200.

    python benchmarks/tp_overlap.py [--steps 20] [--traced]

Prints one JSON line. Measured: milliseconds of wall and of processor time, forward and backward, of a dense layer over
4096 tokens of d_model 512 in fp32, cut over two processes, on and off alternately within the same processes, each first
every second time; medians of rank 0. There the reduce-scatter is work of the same processors. Traced: for one rank of
tp 8 and the layers of Llama 3 8B at an H200's published rates, the time of the reduce-scatters that overlap with the
computation of weights' gradients, and the time of that computation, both as the estimate counts them; the smaller of
the two can be hidden. The traced figures are not measurements.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

BATCH, SEQ_LEN, D_MODEL = 8, 512, 512
LAYERS = 2  # of the traced model
MODEL = Path(__file__).parents[1] / "configs/models/llama-3-8b.yaml"
OVERRIDES = [
    *(f"model.n_layers={LAYERS}", "data.seq_len=8192", "train.micro_batch_size=1", "train.precision=bf16"),
    *("train.recompute=none", "train.global_batch_size=8", "parallel={tp: 8, tp_overlap: true}"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--traced", action="store_true")
    arguments = parser.parse_args()
    if arguments.traced:
        print(json.dumps({"benchmark": "tp_overlap traced", **traced()}))
        return
    from parallel.processes.start import run_ranks

    found = run_ranks(measure, 2, arguments.steps, timeout_seconds=500, threads=1)[0]
    print(json.dumps({"benchmark": "tp_overlap", **found}))


def measure(steps: int) -> dict[str, float]:
    """The milliseconds with and without overlap on this process. All ranks call it."""
    import torch

    from in_turn import time_in_turn
    from modeling.config import ModelConfig
    from modeling.context import Context
    from modeling.decoder import Decoder
    from parallel.apply import build_part
    from parallel.config import ParallelConfig
    from parallel.mesh import close_mesh, open_mesh
    from parallel.sizes import DEFAULT_SIZES

    config = ModelConfig(vocab_size=256, d_model=D_MODEL, n_layers=1, n_heads=8, n_kv_heads=4, d_ff=4 * D_MODEL)
    mesh = open_mesh(ParallelConfig(tp=2), 240)

    def built(overlap: bool) -> Decoder:
        parallel = ParallelConfig(tp=2, tp_overlap=overlap)
        model = build_part(mesh, config, parallel, torch.float32, lambda *_: None, DEFAULT_SIZES, "none")
        torch.manual_seed(mesh.rank)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        return model

    positions_BS = torch.arange(SEQ_LEN).expand(BATCH, SEQ_LEN)
    context = Context(positions_BS, torch.zeros(BATCH, SEQ_LEN, dtype=torch.int32))
    models = {"on": built(True), "off": built(False)}
    ways = {
        name: lambda part_BSD, model=model: model.own_layers[0](part_BSD, context)[0] for name, model in models.items()
    }
    found = time_in_turn(ways, lambda: torch.randn(BATCH, SEQ_LEN // 2, D_MODEL), steps)
    close_mesh()
    return found


def traced() -> dict[str, Any]:
    """Traced milliseconds of a micro-batch, of the reduce-scatter of each kind of block, and of the work beside it."""
    from launcher.estimate.device import open_device

    open_device()
    from launcher.config.load import load_config
    from launcher.estimate.pass_over import trace_rank
    from launcher.estimate.step import near
    from launcher.trace.hardware import read_hardware
    from launcher.trace.ops import Op
    from launcher.trace.roofline import least_seconds
    from parallel.collectives import SequenceGather
    from parallel.mesh import Degrees
    from parallel.zero.patches import replaced

    config = load_config(MODEL, OVERRIDES)
    rates = read_hardware("H200").rates(near(Degrees.of(config.parallel, 8), 0, n_per_node=8))
    now, sent, over_tp, found = [0.0], [0.0], [0.0], []

    def clock(op: Op | None) -> float:
        seconds = 0.0 if op is None else least_seconds(op, rates)[0]
        now[0] += seconds
        if op is not None and op.work.collective is not None:
            sent[0] = seconds
            over_tp[0] += seconds
        return now[0]

    begun: list[tuple[float, float]] = []
    start, wait = SequenceGather.start, SequenceGather.wait

    def starting(self: SequenceGather, *arguments: Any) -> None:
        start(self, *arguments)
        begun.append((now[0], sent[0]))

    def waiting(self: SequenceGather) -> Any:
        at, seconds = begun.pop()
        found.append({"sends": round(1e3 * seconds, 3), "beside it": round(1e3 * (now[0] - at), 3)})
        return wait(self)

    with replaced(SequenceGather, start=starting, wait=waiting):
        trace_rank(config, 8, 0, clock)
    return {
        "micro_batch_ms": round(1e3 * now[0], 2),
        "collectives_ms": round(1e3 * over_tp[0], 2),
        "layers": config.model.n_layers,
        **dict(zip(("feed-forward", "attention"), found, strict=False)),  # of the last layer, which comes first
    }


if __name__ == "__main__":
    main()
