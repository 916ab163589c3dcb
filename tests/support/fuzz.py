"""Feeds broken inputs to each parser that reads what others made: `make fuzz` for an hour, `make test` a fixed number.

Each target is a module fuzz_NAME with ``seeds() -> list[bytes]``, small valid inputs, and ``check(data, folder)``,
which feeds one input to the parser and returns whether it was accepted. The parser's documented refusal is caught
there; any other exception is a violation, as is an input that takes longer or more memory than its bound.
"""

import argparse
import importlib
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does

from mutations import mutate

TARGETS = ("config", "idx", "jsonl", "manifest", "model", "shard")
CASE_SECONDS = 2.0  # the most processor time of a case, which usually takes some milliseconds
HANG_SECONDS = 30  # the most wall time of a case: one that takes longer waits for something
CASE_MIB = 300  # the most that one input may raise the process's peak memory
ROUND = 500  # cases of a target before the next target's turn


@dataclass
class Tally:
    """Counts of one target's inputs: accepted, refused, and violations with a line each."""

    accepted: int = 0
    refused: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """The number of inputs tried."""
        return self.accepted + self.refused + len(self.violations)


class TooSlow(BaseException):
    """Raised by the alarm; no parser's ``except Exception`` catches it."""


def try_cases(name: str, seed: int, numbers: range, folder: Path, tally: Tally) -> None:
    """Feeds the inputs of these numbers to the target and adds the outcomes to ``tally``.

    Inputs that are violations are kept in ``folder``.
    """
    target = importlib.import_module(f"fuzz_{name}")
    seeds = target.seeds()
    for number in numbers:
        data = mutate(random.Random(f"{seed}-{name}-{number}"), seeds)
        wrong = problem_with(target, data, folder)
        if isinstance(wrong, bool):
            tally.accepted += wrong
            tally.refused += not wrong
        else:
            kept = folder / f"{name}-{seed}-{number}.bin"
            kept.write_bytes(data)
            tally.violations.append(f"{name}, seed {seed}, case {number}: {wrong}; the input is in {kept}")


def problem_with(target: Any, data: bytes, folder: Path) -> bool | str:
    """Whether the target accepted the input; or a text that describes the violation."""
    memory, began = peak_mib(), time.process_time()
    try:
        with alarm(HANG_SECONDS):
            accepted = bool(target.check(data, folder))
    except TooSlow:
        return f"no answer within {HANG_SECONDS} s"
    except Exception:
        return f"not a refusal:\n{traceback.format_exc()}"
    seconds, grown = time.process_time() - began, peak_mib() - memory
    if seconds > CASE_SECONDS:
        return f"took {seconds:.1f} s of processor time"
    if grown > CASE_MIB:
        return f"took {grown:.0f} MiB"
    return accepted


def peak_mib() -> float:
    """The peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """A context in which TooSlow is raised after ``seconds``."""

    def ring(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    """The command; returns 1 where an input was not taken as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="seed of the inputs (default: a new one each time)")
    parser.add_argument("--only", choices=TARGETS, default=None, help="fuzz only this parser")
    parser.add_argument("--case", type=int, default=None, help="run only this case of the seed")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    targets = [options.only] if options.only else list(TARGETS)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    print(f"seed {seed}; inputs that were not refused cleanly are kept in {folder}", file=sys.stderr, flush=True)
    tallies = {name: Tally() for name in targets}
    deadline, first = time.monotonic() + 60 * options.minutes, 0
    if options.case is not None:
        for name in targets:
            try_cases(name, seed, range(options.case, options.case + 1), folder, tallies[name])
    while options.case is None and time.monotonic() < deadline:
        for name in targets:
            try_cases(name, seed, range(first, first + ROUND), folder, tallies[name])
        first += ROUND
        done = ", ".join(f"{name} {tally.cases} ({len(tally.violations)} bad)" for name, tally in tallies.items())
        print(done, file=sys.stderr, flush=True)
    violations = sum(len(tally.violations) for tally in tallies.values())
    print(
        json.dumps({"seed": seed, "violations": violations, **{name: asdict(tally) for name, tally in tallies.items()}})
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
