"""Training steps on a CPU through DeepSpeed ZeRO 1, one process each: tokens a second of processor time. One JSON line.

    python benchmarks/zero_step_speed.py [--steps 3] [--rounds 3]

The model, the batches and transformers' class are those of step_speed.py, in bf16 with fp32 masters, torch's AdamW and
clipping at 1. Ours is the engine of a training run, with what a run sets for its process. Theirs is DeepSpeed's own
engine around the class, with its default of bf16 gradients (``transformers``) and with fp32 sums of gradients as ours
(``transformers_fp32_sums``). Each side is a process of its own, in turn; figures are medians over rounds. ``ratio`` is
our speed over that of the faster of the two, ``peak_ratio`` our peak over the smaller one.
"""

import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
from step_speed import BATCH, CONFIG, SEQ_LEN, batch, build_theirs, compare

SIDES = ("ours", "transformers", "transformers_fp32_sums")
LR = 1e-4
CLIP_NORM = 1.0


def main() -> None:
    compare("zero_step_speed", __file__, __doc__, SIDES, measure)


def measure(side: str, steps: int) -> dict[str, float]:
    """Tokens a CPU second over ``steps`` steps after two that warm up, and the process's peak in GB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    step = open_ours() if side == "ours" else open_theirs(fp32_sums=side == "transformers_fp32_sums")
    start = 0.0
    for number in range(steps + 2):
        if number == 2:
            start = time.process_time()
        step(number)
    rate = steps * BATCH * SEQ_LEN / (time.process_time() - start)
    return {"tokens_a_cpu_second": rate, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def open_ours() -> Callable[[int], None]:
    """One update of our engine, by its number."""
    from launcher.config.tree import RunConfig
    from launcher.training.loop import prepare_process
    from modeling.context import Context
    from modeling.optimizers.adamw import AdamWConfig
    from parallel.config import ParallelConfig
    from parallel.mesh import open_mesh
    from parallel.zero.engine import Engine

    prepare_process(RunConfig())
    mesh = open_mesh(ParallelConfig(zero=1), 600)
    optimizer = AdamWConfig(lr=LR, clip_norm=CLIP_NORM)
    engine = Engine(mesh, CONFIG, optimizer, parallel=ParallelConfig(zero=1), precision="bf16", micro_batch_size=BATCH)
    engine.initialize_weights(0)

    def step(number: int) -> None:
        tokens_BS, targets_BS, positions_BS, documents_BS = batch(number)
        context = Context(positions_BS, documents_BS, balance_scale=1 / BATCH)
        output = engine.model(tokens_BS, context, targets_BS)
        engine.backward(output.loss, 1 / targets_BS.numel(), last=True)
        engine.step(LR)

    return step


def open_theirs(*, fp32_sums: bool) -> Callable[[int], None]:
    """One update of transformers' class in DeepSpeed's engine, by its number."""
    import parallel.zero.patches  # noqa: F401  (else DeepSpeed builds a collective by a compiler)

    # isort: split

    import deepspeed

    model, loss = build_theirs(autocast=False)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
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
