"""Times training steps on a CPU through DeepSpeed ZeRO 1, in tokens per second of processor time. One JSON line.

    python benchmarks/zero_step_speed.py [--steps 3] [--rounds 3] [--precision fp32|bf16|auto]

The model, the batches and transformers' class are those of step_speed.py, in fp32 or in bf16 with fp32 masters, torch's
AdamW and clipping at 1. ``ours`` is the engine of a training run, in a process set up as by a run. The peers are
DeepSpeed's own engine around the class, in bf16 with its default of bf16 gradients (``transformers``) and with fp32
sums of gradients as in Roundtable (``transformers_fp32_sums``). Each side is one process of its own, run alternately;
figures are medians over rounds. ``ratio`` is Roundtable's speed over that of the fastest peer, ``peak_ratio`` its peak
memory over the smallest peer's.
"""

import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import torch

from modeling.dtypes import DTYPES
from sides import Figures, Side, compare
from step_speed import BATCH, CLIP_NORM, CONFIG, SEQ_LEN, batch, build_transformers

SIDES = (
    Side(name="ours", beside=None),
    Side(name="transformers"),
    Side(name="transformers_fp32_sums", precisions=("bf16",)),
)
LR = 1e-4


def main() -> None:
    compare("zero_step_speed", __file__, __doc__, SIDES, measure)


def measure(side: str, steps: int, precision: str) -> Figures:
    """Tokens a CPU second over ``steps`` steps after two that warm up, and the process's peak in GB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    fp32_sums = side == "transformers_fp32_sums"
    step = open_ours(precision) if side == "ours" else open_theirs(precision, fp32_sums=fp32_sums)
    start = 0.0
    for number in range(steps + 2):
        if number == 2:
            start = time.process_time()
        step(number)
    rate = steps * BATCH * SEQ_LEN / (time.process_time() - start)
    return {"tokens_a_cpu_second": rate, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def free_port() -> int:
    """A TCP port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def open_ours(precision: str) -> Callable[[int], None]:
    """A function that runs one update of Roundtable's engine on the batch of the given number."""
    from launcher.config.tree import RunConfig
    from launcher.training.compiling import fuse_of
    from launcher.training.loop import prepare_process
    from modeling.context import Context
    from modeling.optimizers.adamw import AdamWConfig
    from parallel.config import ParallelConfig
    from parallel.mesh import open_mesh
    from parallel.zero.engine import Engine

    prepare_process(RunConfig())
    mesh = open_mesh(ParallelConfig(zero=1), 600)
    optimizer = AdamWConfig(lr=LR, clip_norm=CLIP_NORM)
    engine = Engine(
        mesh,
        CONFIG,
        optimizer,
        parallel=ParallelConfig(zero=1),
        precision=precision,
        micro_batch_size=BATCH,
        fuse=fuse_of("auto", "cpu"),
    )
    engine.initialize_weights(0)

    def step(number: int) -> None:
        tokens_BS, targets_BS, positions_BS, documents_BS = batch(number)
        context = Context(positions_BS, documents_BS, balance_scale=1 / BATCH)
        output = engine.model(tokens_BS, context, targets_BS)
        engine.backward(output.loss, 1 / targets_BS.numel(), last=True)
        engine.step(LR)

    return step


def open_theirs(precision: str, *, fp32_sums: bool) -> Callable[[int], None]:
    """A function that runs one update of transformers' class in DeepSpeed's engine on the batch of the given number."""
    import parallel.zero.patches  # noqa: F401  (without it DeepSpeed compiles a collective of its own)

    # isort: split

    import deepspeed

    model, loss = build_transformers(CONFIG, DTYPES[precision])
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": precision == "bf16"},
        "gradient_clipping": CLIP_NORM,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if fp32_sums:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    deepspeed.init_distributed("gloo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(number: int) -> None:
        engine.backward(loss(*batch(number)))
        engine.step()

    return step


if __name__ == "__main__":
    main()
