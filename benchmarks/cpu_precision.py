"""Chooses the precision of benchmarks on a CPU: the one asked for, or the one in which the processor multiplies fast.

Without AVX-512 a product in bf16 takes many times as long as one in fp32, on every side of a comparison.
"""

import argparse

from launcher.processor.narrow import narrow_cost

PRECISIONS = ("fp32", "bf16")


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--precision`` to the parser."""
    told = "auto, the default: bf16 where the processor multiplies it at least as fast as fp32"
    parser.add_argument("--precision", choices=(*PRECISIONS, "auto"), default="auto", help=told)


def choose_precision(asked: str) -> dict[str, str | float]:
    """The entries of a JSON line: ``precision``, fp32 or bf16; for "auto" also ``bf16_speed``.

    ``bf16_speed`` is the speed of a product in bf16, fp32's being 1.
    """
    if asked != "auto":
        return {"precision": asked}
    speed = 1 / narrow_cost()
    return {"precision": "bf16" if speed >= 1 else "fp32", "bf16_speed": round(speed, 3)}
