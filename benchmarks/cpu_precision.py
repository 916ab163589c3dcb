"""The precision of benchmarks on a CPU: the one that is asked for, or the one in which the processor multiplies fast.

Without AVX-512 a product in bf16 takes many times as long as one in fp32, on every side of a comparison.
"""

import argparse
import time

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPE = (512, 384, 768)  # of the product that is timed


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Gives the parser ``--precision``."""
    told = "auto, the default: bf16 where the processor multiplies it at least as fast as fp32"
    parser.add_argument("--precision", choices=(*DTYPES, "auto"), default="auto", help=told)


def choose_precision(asked: str) -> dict[str, str | float]:
    """What a JSON line tells of it: ``precision``, fp32 or bf16; and ``bf16_speed`` where it was chosen here.

    ``bf16_speed`` is the speed of a product in bf16, fp32's being 1.
    """
    if asked != "auto":
        return {"precision": asked}
    speed = bf16_speed()
    return {"precision": "bf16" if speed >= 1 else "fp32", "bf16_speed": round(speed, 3)}


def bf16_speed() -> float:
    """A product's processor time in fp32 over that in bf16, on one thread: the least of five each, in turn."""
    torch.set_num_threads(1)
    times = [{name: product_seconds(dtype) for name, dtype in DTYPES.items()} for _ in range(5)]
    return min(each["fp32"] for each in times) / min(each["bf16"] for each in times)


def product_seconds(dtype: torch.dtype) -> float:
    """Processor time of one product."""
    rows, inner, columns = SHAPE
    left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    start = time.process_time()
    left @ right
    return time.process_time() - start
