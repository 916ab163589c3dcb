"""Runs the CPU benchmarks that take minutes, one after another; each prints its JSON line with its processor time.

    python benchmarks/cpu_set.py [--only NAME]... [--out FILE] [--precision fp32|bf16|auto]

``cpu_seconds`` is the processor time of the script and all processes that it starts. The lines are also written to
FILE. The set is sized for less than 20 minutes on two idle cores whose processor multiplies bf16; each side of a
comparison is a process of its own, started three times. In fp32 a step takes three times as long, so there are fewer
turns (docs/measurements.md).
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from cpu_precision import add_precision, choose_precision

HERE = Path(__file__).parent
SET: dict[str, tuple[str, ...]] = {
    "attention_documents": (),
    "moe_layer": (),
    "recomputation": (),
    "step_speed": ("--steps", "1", "--rounds", "3"),
    "zero_step_speed": ("--steps", "1", "--rounds", "3"),
}
IN_FP32 = {"recomputation": ("--turns", "1")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SET, action="append")
    parser.add_argument("--out", type=Path)
    add_precision(parser)
    arguments = parser.parse_args()
    chosen = choose_precision(arguments.precision)
    lines = [run(name, str(chosen["precision"])) for name in arguments.only or SET]
    if arguments.out is not None:
        arguments.out.write_text("".join(f"{line}\n" for line in lines))
    total = sum(json.loads(line)["cpu_seconds"] for line in lines)
    print(json.dumps({"benchmark": "cpu_set", **chosen, "cpu_seconds": round(total, 1)}))


def run(name: str, precision: str) -> str:
    """Runs one benchmark of the set; returns its JSON line with ``cpu_seconds``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    options = IN_FP32.get(name, SET[name]) if precision == "fp32" else SET[name]
    command = [sys.executable, str(HERE / f"{name}.py"), *options, "--precision", precision]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    line = json.dumps({**json.loads(done.stdout.splitlines()[-1]), "cpu_seconds": round(spent, 1)})
    print(line, flush=True)
    return line


if __name__ == "__main__":
    main()
