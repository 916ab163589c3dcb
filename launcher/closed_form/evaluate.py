"""The error of the closed forms on published rows, each publisher left out of the fit that predicts its rows."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from launcher.closed_form.architecture import CannotPlan
from launcher.closed_form.consistency import contradictions, miscounts
from launcher.closed_form.fit import fit
from launcher.closed_form.gpus import Gpu, capacity, gpu_of
from launcher.closed_form.memory import MEMORY_CONSTANTS, Memory, memory_of
from launcher.closed_form.rows import Job, job_of, measured_bytes, measured_seconds, ran_out
from launcher.closed_form.seconds import CONSTANTS, Batch
from launcher.closed_form.systems import publisher
from launcher.closed_form.work import Work, work_of

COVERED = 0.8  # share of another publisher's rows that an interval should contain
FEW = 30  # with fewer errors of a kind, those of all kinds are taken
NORMAL = 1.2816  # what a normal distribution exceeds in a tenth of its cases
STUDENT = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)  # the same of Student's t, by freedom


@dataclass
class Case:
    """A published row that can be planned, with its job, its amounts of work, and what was measured."""

    row: Mapping[str, Any]
    publisher: str
    job: Job
    gpu: Gpu
    work: Work
    memory: Memory
    seconds: float | None
    bytes: float | None
    problems: list[str]  # contradictions, for which it is left out of fits
    remarks: list[str]  # TFLOP/s that are counted in an unusual way, which does not concern its seconds


@dataclass
class Error:
    """The error of one row's plan, whose fit left out the row's publisher, and the interval around the plan.

    ``value`` is the logarithm of plan over measurement; ``low`` and ``high`` are logarithms of measurement over plan.
    """

    case: Case
    value: float
    low: float = 0.0
    high: float = 0.0

    @property
    def relative(self) -> float:
        """The plan's error, as a share of what was measured."""
        return math.expm1(self.value)

    @property
    def is_covered(self) -> bool:
        """Whether the measurement lies in the interval."""
        return self.low <= -self.value <= self.high


@dataclass
class Evaluation:
    """The errors of all rows, each publisher left out of its fit, and the constants and intervals of a fit to all."""

    cases: list[Case]
    unplanned: list[tuple[str, str]]  # id, reason
    time: list[Error]
    memory: list[Error]
    fitted: dict[str, float]
    fitted_memory: dict[str, float]
    told: dict[str, list[float]] = field(default_factory=dict)  # intervals of time by kind, and of memory


def cases_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Case], list[tuple[str, str]]]:
    """The rows that can be planned, and the others with the reason."""
    cases, others = [], []
    for row in rows:
        try:
            job = job_of(row)
            gpu = gpu_of(job.gpu, job.per_node, job.interconnect)
            work = work_of(job, gpu)
        except CannotPlan as reason:
            others.append((str(row.get("id")), str(reason)))
            continue
        origin = publisher(str(row.get("source") or ""))
        measured = measured_seconds(row), measured_bytes(row)
        cases.append(Case(row, origin, job, gpu, work, memory_of(job), *measured, contradictions(row), miscounts(row)))
    return cases, others


def evaluate(rows: Sequence[Mapping[str, Any]]) -> Evaluation:
    """Evaluates the closed forms on these rows: fits once without each publisher, then to all rows."""
    cases, others = cases_of(rows)
    timed = [case for case in cases if case.seconds is not None and not ran_out(case.row)]
    held = [case for case in cases if case.bytes is not None]
    time, memory = [], []
    for origin in sorted({case.publisher for case in cases}):
        constants = fit_seconds([case for case in timed if case.publisher != origin])
        mine = [case for case in timed if case.publisher == origin]
        time += errors(mine, predicted(mine, constants), [case.seconds for case in mine])
        constants = fit_memory([case for case in held if case.publisher != origin])
        mine = [case for case in held if case.publisher == origin]
        memory += errors(mine, [case.memory.peak(constants) for case in mine], [case.bytes for case in mine])
    cover(time, by_kind=True)
    cover(memory, by_kind=False)
    found = Evaluation(cases, others, time, memory, fit_seconds(timed), fit_memory(held))
    found.told = {kind: limits(time, kind) for kind in ("dense", "MoE")} | {"memory": limits(memory, None)}
    return found


def batch_of(cases: Sequence[Case]) -> Batch:
    """The cases' amounts as arrays."""
    return Batch([case.work for case in cases], [case.job for case in cases], [case.gpu for case in cases])


def predicted(cases: Sequence[Case], constants: Mapping[str, float]) -> Any:
    """Planned seconds of each case's step."""
    return batch_of(cases).seconds(constants) if cases else []


def fit_seconds(cases: Sequence[Case]) -> dict[str, float]:
    """The constants of the time model, fitted to the cases without contradictions."""
    sound = [case for case in cases if not case.problems]
    measured = np.array([case.seconds for case in sound], dtype=float)
    return fit(batch_of(sound).seconds, measured, [case.publisher for case in sound], CONSTANTS)


def fit_memory(cases: Sequence[Case]) -> dict[str, float]:
    """The constants of the memory model, fitted to the cases without contradictions."""
    sound = [case for case in cases if not case.problems]
    measured = np.array([case.bytes for case in sound], dtype=float)

    def peaks(constants: Mapping[str, float]) -> Any:
        return np.array([case.memory.peak(constants) for case in sound])

    return fit(peaks, measured, [case.publisher for case in sound], MEMORY_CONSTANTS)


def errors(cases: Sequence[Case], plans: Any, measured: Sequence[float | None]) -> list[Error]:
    """The error of each case."""
    return [Error(case, math.log(plan / (one or 1.0))) for case, plan, one in zip(cases, plans, measured, strict=True)]


def cover(found: list[Error], *, by_kind: bool) -> None:
    """Sets each error's interval from the errors of all other publishers; ``by_kind``: of its own kind of row."""
    for origin in {each.case.publisher for each in found}:
        others = [each for each in found if each.case.publisher != origin]
        for each in found:
            if each.case.publisher == origin:
                kind = each.case.job.kind.split()[0] if by_kind else None
                each.low, each.high = limits(others, kind)


def limits(found: Sequence[Error], kind: str | None) -> list[float]:
    """[low, high] of log(measurement / plan) between which COVERED of a further publisher's rows should lie.

    Errors differ more between publishers than within one. The median error of a further publisher is assumed to be
    distributed like those of the known ones (by Student's t, as they are few), and its rows to scatter around it like
    the known publishers' rows on average. ``kind``: of rows; None: all. A kind with fewer than FEW errors takes the
    interval of all kinds, widened by the ratio of its errors' size to theirs.
    """
    mine = [each for each in found if kind is None or each.case.job.kind.startswith(kind)]
    if len(mine) >= FEW:
        return spread_of(mine)
    wider = max(1.0, size_of(mine) / size_of(found)) if mine else 1.0
    return [wider * each for each in spread_of(found)]


def size_of(found: Sequence[Error]) -> float:
    """The root mean square of the errors."""
    return math.sqrt(sum(each.value**2 for each in found) / len(found))


def spread_of(found: Sequence[Error]) -> list[float]:
    """[low, high] as for ``limits``, from all of these errors; infinite where there are none."""
    if not found:
        return [-math.inf, math.inf]
    edge = (1 - COVERED) / 2
    groups: dict[tuple[str, str], list[float]] = {}
    for each in found:
        groups.setdefault((each.case.publisher, each.case.job.kind.split()[0]), []).append(-each.value)
    tenths = [np.quantile(values, (edge, 0.5, 1 - edge)) for _, values in sorted(groups.items())]
    n = len(tenths)
    if n == 1:
        return [float(tenths[0][0]), float(tenths[0][2])]
    middles = [middle for _, middle, _ in tenths]
    within = [((high - low) / (2 * NORMAL)) ** 2 for low, _, high in tenths if high > low]
    between = student(n - 1) ** 2 * statistics.variance(middles) * (1 + 1 / n)
    half = math.sqrt(between + NORMAL**2 * (np.mean(within) if within else 0.0))
    return [float(np.mean(middles) - half), float(np.mean(middles) + half)]


def student(freedom: int) -> float:
    """The 90th percentile of Student's t distribution; beyond it lies half of what COVERED leaves out."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL + 0.9 / freedom


def wrong_verdicts(
    found: Sequence[Error], cases: Sequence[Case], fitted: Mapping[str, float]
) -> list[tuple[Case, bool]]:
    """(case, whether the plan says that it fits in memory) of each row whose run showed the opposite."""
    wrong = []
    for each in found:
        plan = math.exp(each.value) * (each.case.bytes or 0.0)
        if plan > capacity(each.case.gpu):
            wrong.append((each.case, False))
    for case in cases:
        if ran_out(case.row) and case.memory.peak(fitted) <= capacity(case.gpu):
            wrong.append((case, True))
    return wrong
