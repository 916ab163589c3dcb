"""Runs the sides of a comparison in processes of their own, alternately, and prints one JSON line about all of them.

Packages of peers are looked for in build/peers, where docs/measurements.md installs them, and in the environment.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from statistics import median

import torch

from cpu_precision import PRECISIONS, add_precision, choose_precision

PEERS = Path(__file__).parents[1] / "build" / "peers"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison: Roundtable in some variant, or a peer."""

    name: str
    beside: str | None = "ours"  # Roundtable's side that does the same work; None: this is one of Roundtable's
    compiled: bool = False  # by torch.compile; compiled peers have ratios of their own
    package: str | None = None  # the package that it needs, without which it is left out; None: none
    precisions: tuple[str, ...] = PRECISIONS


Figures = dict[str, float]  # tokens_a_cpu_second, peak_gb
Measure = Callable[[str, int, str], Figures]  # (side, steps, precision) -> the figures of the process that calls it


def compare(name: str, script: str, about: str | None, sides: Sequence[Side], measure: Measure) -> None:
    """Measures all sides in processes of ``script`` and prints one JSON line.

    With --side, this process measures that side by ``measure`` and prints its figures. A side whose package is missing,
    or which does not run, has a text in place of figures. ``about`` is the description for --help.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=[side.name for side in sides])
    add_precision(parser)
    arguments = parser.parse_args()
    sys.path.append(str(PEERS))
    if arguments.side is not None:
        print(json.dumps(measure(arguments.side, arguments.steps, arguments.precision)))
        return
    chosen = choose_precision(arguments.precision)
    there, told = present(sides, str(chosen["precision"]))
    found: dict[str, list[Figures]] = {side.name: [] for side in there}
    command = [sys.executable, script, "--steps", str(arguments.steps), "--precision", str(chosen["precision"])]
    for _ in range(arguments.rounds):
        for side in [side for side in there if side.name in found]:
            done = subprocess.run([*command, "--side", side.name], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found[side.name].append(json.loads(done.stdout.splitlines()[-1]))
                continue
            if side.package is None:
                raise SystemExit(f"{side.name} failed:\n{done.stderr}")
            told[side.name] = f"does not run: {(done.stderr.splitlines() or [f'exit code {done.returncode}'])[-1]}"
            del found[side.name]
    line = summary(there, found)
    print(json.dumps({"benchmark": name, "torch": torch.__version__, **chosen, **told, **line}))


def present(sides: Sequence[Side], precision: str) -> tuple[list[Side], dict[str, str]]:
    """The sides to be measured, and a text for each whose package is missing.

    Variants of Roundtable that no remaining side is compared with are left out.
    """
    fitting = [side for side in sides if precision in side.precisions]
    installed = {each.name for each in distributions()}
    there = [side for side in fitting if side.package is None or side.package in installed]
    wanted = {side.beside for side in there}
    told = {side.name: "not installed" for side in fitting if side not in there}
    return [side for side in there if side.beside is not None or side.name in wanted], told


def summary(sides: Sequence[Side], found: dict[str, list[Figures]]) -> dict[str, object]:
    """Each side's medians over its rounds, a peer's ratios, and the ratios against the best of the peers.

    ``ratio`` is Roundtable's speed over the peer's, and over all peers the least of these; ``peak_ratio`` is its peak
    memory over the peer's, and over all peers the largest. Those of compiled peers are ``compiled_ratio`` and
    ``compiled_peak_ratio``.
    """
    medians = {name: {key: median(each[key] for each in rounds) for key in rounds[0]} for name, rounds in found.items()}
    ratios: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    line: dict[str, object] = {}
    for side in sides:
        if side.name not in medians:
            continue
        figures = medians[side.name]
        shown = {key: round(value, 2) for key, value in figures.items()}
        if side.beside is not None:
            ours = medians[side.beside]
            speed, peak = (ours[key] / figures[key] for key in ("tokens_a_cpu_second", "peak_gb"))
            ratios[side.compiled].append((speed, peak))
            shown |= {"ratio": round(speed, 3), "peak_ratio": round(peak, 3)}
        line[side.name] = shown
    for compiled, prefix in ((False, ""), (True, "compiled_")):
        if ratios[compiled]:
            speeds, peaks = zip(*ratios[compiled], strict=True)
            line |= {f"{prefix}ratio": round(min(speeds), 3), f"{prefix}peak_ratio": round(max(peaks), 3)}
    return line


def in_turn(
    script: str, sides: Sequence[tuple[str, str]], options: Sequence[str], starts: int, turns: int
) -> dict[tuple[str, str], list[float]]:
    """Each side's figures. All sides' processes are started together and measured alternately, ``turns`` times each.

    This is repeated ``starts`` times with new processes, since the placement of memory in a process affects figures.
    """
    found: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
    for _ in range(starts):
        with waiting(script, sides, options) as measured:
            for side in [*sides] * turns:
                found[side].append(measured(side))
    return found


@contextmanager
def waiting(
    script: str, sides: Sequence[tuple[str, str]], options: Sequence[str]
) -> Iterator[Callable[[tuple[str, str]], float]]:
    """Starts ``script --side NAME NAME OPTIONS`` for each side; each process calls ``takes_turns``.

    Yields a function that lets a side's process measure once, while the others wait, and returns the figure. So starts
    and warm-ups happen once, and all sides of a round are measured within seconds. The processes end with the context.
    """
    with ExitStack() as stack:
        processes: dict[tuple[str, str], subprocess.Popen[str]] = {}

        def heard(side: tuple[str, str]) -> float:
            stream = processes[side].stdout
            line = "" if stream is None else stream.readline()
            if not line:
                raise SystemExit(f"{' '.join(side)} failed: exit code {processes[side].wait()}")
            return float(line)

        def measured(side: tuple[str, str]) -> float:
            print("turn", file=processes[side].stdin, flush=True)
            return heard(side)

        for side in sides:
            command = [sys.executable, script, "--side", *side, *options]
            begun = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes[side] = stack.enter_context(begun)
            heard(side)  # it has warmed up
        yield measured


def takes_turns(measure: Callable[[], float]) -> None:
    """Runs in a side's process: measures once to warm up, then once for each line of stdin, and prints each figure."""
    print(measure(), flush=True)
    for _ in sys.stdin:
        print(measure(), flush=True)
