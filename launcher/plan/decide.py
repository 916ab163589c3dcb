"""Reorders the best layouts of a search by traces, each in a process of its own, as far as there is time for them."""

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launcher.closed_form.forecast import fitted
from launcher.closed_form.gpus import Gpu, capacity
from launcher.closed_form.rows import GIB
from launcher.config.tree import RunConfig
from launcher.estimate.command import command_of
from launcher.plan.ask import CHILD
from launcher.plan.corrections import corrected, factors_for
from launcher.plan.search import Found, Searched, overrides_of

AT_ONCE = 2  # traces that run at the same time
PAUSE_SECONDS = 0.05
WHOLE_SECONDS = 50.0  # of a search with its traces: the command itself starts and ends within the rest of a minute


@dataclass(frozen=True)
class Verdict:
    """The result of tracing one layout: its plan, or the reason why there is none."""

    plan: dict[str, Any] | None = None
    fits: bool = True
    reason: str = ""


@dataclass
class Child:
    """A process that traces one layout."""

    number: int
    process: "subprocess.Popen[bytes]"
    answer: IO[bytes]  # a file: a pipe would fill, and keep the process waiting
    began: float


def decide(
    found: Searched,
    path: Path,
    overrides: Sequence[str],
    gpu: str,
    part: Gpu,
    n_gpus: int,
    n_traces: int,
    seconds: float,
) -> list[Verdict]:
    """Traces the first ``n_traces`` layouts of ``found.best`` within ``seconds``, and reorders that list by the traces.

    Layouts that were not traced keep their places; those that do not fit, by their trace, go to the end. Returns a
    verdict for each layout, in the new order.
    """
    chosen = found.best[:n_traces]
    changes = [overrides_of(each.config, found.given) for each in chosen]
    plans = traced(changes, path, overrides, gpu, n_gpus, seconds)
    verdicts = [judged(plan, found.best[0].config, part) for plan in plans]
    verdicts += [Verdict(reason="not among the first")] * (len(found.best) - len(verdicts))
    found.best, verdicts = in_order(found.best, verdicts)
    return verdicts


def judged(verdict: Verdict, config: RunConfig, part: Gpu) -> Verdict:
    """A trace's figures with measured runs' corrections, and whether its memory fits, by the closed forms' rule."""
    if verdict.plan is None:
        return verdict
    kind = "dense" if config.model.moe is None else "MoE"
    plan = corrected(verdict.plan, factors_for(part.hardware.name, kind, "traced"))
    known = fitted().memory
    peak = plan["peak_bytes"] * known["reserved"] + known["outside"] * GIB
    return Verdict({**plan, "peak_gb": peak / GIB}, peak <= capacity(part))


def in_order(best: Sequence[Found], verdicts: Sequence[Verdict]) -> tuple[list[Found], list[Verdict]]:
    """The layouts and their verdicts in a new order: traced ones that fit share their places, the fastest first.

    Layouts that were not traced keep their places; those that do not fit come last.
    """
    rows = list(zip(best, verdicts, strict=True))
    fitting = [row for row in rows if row[1].fits]
    ranked = iter(sorted((row for row in fitting if row[1].plan is not None), key=lambda row: seconds_of(row[1])))
    filled = [next(ranked) if row[1].plan is not None else row for row in fitting]
    filled += [row for row in rows if not row[1].fits]
    return [layout for layout, _ in filled], [verdict for _, verdict in filled]


def seconds_of(verdict: Verdict) -> float:
    """Seconds of a step by the layout's trace."""
    assert verdict.plan is not None
    return verdict.plan["step_seconds"]


def traced(
    changes: Sequence[list[str]], path: Path, overrides: Sequence[str], gpu: str, n_gpus: int, seconds: float
) -> list[Verdict]:
    """Each layout's plan by a process of its own, ``AT_ONCE`` at a time. After ``seconds`` the unfinished are ended."""
    began, waiting, running = time.monotonic(), list(range(len(changes))), list[Child]()
    found = [Verdict(reason=f"no time was left of {WHOLE_SECONDS:g} s") for _ in changes]
    try:
        while waiting or running:
            left = seconds - (time.monotonic() - began)
            while waiting and len(running) < AT_ONCE and left > 0:
                number = waiting.pop(0)
                running.append(started(number, [*overrides, *changes[number]], path, gpu, n_gpus))
            if left <= 0:
                for child in running:
                    took = time.monotonic() - child.began
                    found[child.number] = Verdict(reason=f"its trace was not done after {took:.0f} s")
                break
            for child in [each for each in running if each.process.poll() is not None]:
                running.remove(child)
                found[child.number] = answer_of(child)
            time.sleep(PAUSE_SECONDS)
    finally:
        for child in running:
            child.process.kill()
            child.process.wait()
            child.answer.close()
    return found


def started(number: int, overrides: Sequence[str], path: Path, gpu: str, n_gpus: int) -> Child:
    """A process that traces one layout."""
    request = {"config": str(path), "overrides": list(overrides), "gpu": gpu, "imbalance": 1.0}
    text = json.dumps({**request, "world_size": n_gpus, "price": None, "sampled": True})
    command = command_of(CHILD)
    answer = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the answer
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=answer, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(text.encode())
    process.stdin.close()
    return Child(number, process, answer, time.monotonic())


def answer_of(child: Child) -> Verdict:
    """The verdict of a process that has ended: its plan, or why it has none."""
    with child.answer as file:
        file.seek(0)
        out = file.read().decode()
    if child.process.returncode != 0 or not out.strip():
        return Verdict(reason=f"its trace ended with exit code {child.process.returncode}")
    answer = json.loads(out.splitlines()[-1])
    return Verdict(reason=answer["problems"][0]) if "problems" in answer else Verdict(answer)


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The fields ``trace`` and ``not_traced`` of a layout's row in JSON.

    GB are 2^30 bytes and include memory outside of tensors.
    """
    if verdict.plan is None:
        return {"trace": None, "not_traced": verdict.reason}
    plan = verdict.plan
    keys = ("step_seconds", "peak_gb", "tokens_per_second", "mfu", "hours", "energy_kwh", "cost")
    figures = {key: plan[key] for key in keys}
    return {"trace": {**figures, "fits": verdict.fits, "seconds_by_part": plan["parts"]}, "not_traced": None}
