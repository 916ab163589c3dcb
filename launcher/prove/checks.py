"""The checks of a proof: each compares the ranks' results with one plain process's, and gives one line of the table."""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from launcher.prove.compare.boxes import TensorBox, Uncovered, assemble
from launcher.prove.compare.errors import execution_order, norm, tensor_errors, total_norm
from launcher.prove.compare.routing import Replayed
from launcher.prove.rank import PhaseSeen, RankSeen, StepSeen
from launcher.prove.reference import ReferenceStep
from launcher.prove.rounding import Bounds, Moves, Nudged, bounds_for

LOSS_BOUND = 1e-6  # relative
GRADIENT_BOUND = 1e-5  # of each tensor's own norm
WEIGHT_BOUND = 1e-6  # of each tensor's own norm
BIAS_BOUND = 1e-7  # absolute; a bias moves by a fixed rate, so a fault makes a difference of at least that rate
# AdamW divides by the root of the second moment, so where a gradient is next to zero its rounding error decides the
# update's sign. An element below TINY of its tensor's root mean square in some step is left out: above it, a gradient
# within GRADIENT_BOUND moves an update by no more than DRIFT_BOUND. Muon enlarges a rounding error in a small singular
# value of the momentum by up to 485 (3.4445^5). So with AdamW and Muon, weights may differ from the plain run's by such
# a share of the update; what the optimizer makes of equal gradients is held to WEIGHT_BOUND.
DRIFT_BOUND = 1e-2
# A share of the update, where the optimizer's rule itself computes in 16 bits. Changing an input's last bit in bf16
# moves Muon's update by 1e-2 of its size (1.1e-2 was seen over matrices of 32 to 1,024 rows), a fault by all of it.
LOW_UPDATE_BOUND = 5e-2
# How many times DRIFT_BOUND may be allowed where rounding alone moves an update by more. That is a tenth of the update,
# so an update that was never made still fails.
MOST_DRIFT = 10
TINY = GRADIENT_BOUND / DRIFT_BOUND
# The norm of a gradient that is zero by algebra (``Weight.cancels``), as a share of all gradients' norm: 2e-9 was seen
# for keys' biases, over some hundred tokens; with a fault they are as large as the queries' (1e-3 and more).
CANCELLED_BOUND = 1e-7
# A gradient below this share of all gradients' norm is rounding alone (for example that of a router whose only choice
# has weight one), and AdamW's update from it is noise, so it is not compared.
ROUNDING_SHARE = 1e-9
# Eight equal rounds of micro-batches against one, as a share of each tensor's norm. A sum in fp32 is exact: a gradient
# has 8 bits (bf16) or 11 (fp16), eight times it needs three more, and fp32 has 24; dividing by eight is exact. In 16
# bits 3, 5, 6 and 7 times a number do not fit: each addition rounds by up to 2^-9 of the sum in bf16 and 2^-12 in fp16,
# and eight of them leave an error of 6e-3 and 6e-4 of a tensor's norm.
ACCUMULATION_BOUND = 1e-5

COPY = "a copy of "
HELDOUT = "held-out loss"  # the name of its check

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Check:
    """One line of the table. ``worst`` names the tensor, step or rank with the largest error."""

    phase: str
    name: str
    worst: str
    error: float
    bound: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound. A NaN error is not."""
        return self.error <= self.bound


def whole_or_failed(
    phase: str, name: str, pieces: Iterable[TensorBox], shapes: Shapes
) -> tuple[dict[str, Tensor] | None, Check | None]:
    """The logical tensors put together from all ranks' pieces, or a failed check where the pieces do not cover them."""
    try:
        return assemble(pieces, shapes), None
    except Uncovered as error:
        return None, Check(phase, name, str(error), math.inf, 0.0)


def check_tensors(
    phase: str,
    name: str,
    pieces: Iterable[TensorBox],
    theirs: Mapping[str, Tensor],
    bound: float,
    step: str = "",
    left_out: Collection[str] = (),
    nudged: Nudged | None = None,
) -> Check:
    """Compares every logical tensor with one process's, by the difference relative to its norm; shows the worst.

    ``launcher.prove.rounding.bounds_for`` raises ``bound`` for tensors that ``nudged`` weights move farther. Where some
    tensors exceed their bounds, the one that exceeds its bound by the largest factor is shown.
    """
    pieces = [piece for piece in pieces if piece.name not in left_out]
    theirs = {key: value for key, value in theirs.items() if key not in left_out}
    ours, failed = whole_or_failed(phase, name, pieces, shapes_of(theirs))
    if ours is None:
        assert failed is not None
        return failed
    errors = tensor_errors(ours, theirs) | copy_errors(pieces, ours, theirs)
    worst, bound, note = held_to(errors, bounds_for(bound, errors, moves_of(nudged, theirs)))
    return Check(phase, name, f"{worst}{step}", errors[worst], bound, note)


def held_to(errors: Mapping[str, float], bounds: Bounds) -> tuple[str, float, str]:
    """The name to show, its bound, and a note where that bound was raised.

    The name is that of the largest error, or where some exceed their bounds, of the one that does so by the most.
    """
    excess, share = largest({key: errors[key] / bounds.of(key.removeprefix(COPY)) for key in errors})
    worst = largest(errors)[0] if share <= 1 else excess
    told = worst.removeprefix(COPY)
    return worst, bounds.of(told), bounds.note(told)


def moves_of(nudged: Nudged | None, theirs: Mapping[str, Tensor]) -> Moves | None:
    """A function that gives how far each draw of ``nudged`` moves each of ``theirs``; None without ``nudged``."""
    return None if nudged is None else lambda: [tensor_errors(drawn, theirs) for drawn in nudged()]


def check_trained(
    phase: str,
    name: str,
    pieces: Iterable[TensorBox],
    theirs: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    left_out: Collection[str],
    nudged: Nudged,
) -> list[Check]:
    """Compares the weights after some steps with one process's: one check, and one of the weights that started at zero.

    The latter are the sum of a few gradients and nothing else, so they are held to GRADIENT_BOUND, the others to
    WEIGHT_BOUND.
    """
    pieces = list(pieces)
    theirs = {key: value for key, value in theirs.items() if key not in left_out}
    drawn = {key: value for key, value in theirs.items() if start[key].any()}
    summed = {key: value for key, value in theirs.items() if key not in drawn}
    sides = [(name, drawn, WEIGHT_BOUND), (f"{name}, from zero", summed, GRADIENT_BOUND)]
    return [
        check_tensors(phase, told, [piece for piece in pieces if piece.name in tensors], tensors, bound, nudged=nudged)
        for told, tensors, bound in sides
        if tensors
    ]


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Each tensor's shape."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def copy_errors(
    pieces: Iterable[TensorBox], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> dict[str, float]:
    """The error of each tensor of which a rank holds a copy (a piece that is not the owner's), taken with its copies.

    Copies are put into ``ours`` in place of the owner's elements; the keys are the tensors' names after COPY.
    """
    copied: dict[str, Tensor] = {}
    for piece in pieces:
        if not piece.is_owner:
            copied.setdefault(piece.name, ours[piece.name].clone())[piece.box.slices] = piece.value
    errors = tensor_errors({**ours, **copied}, theirs)
    return {f"{COPY}{name}": errors[name] for name in copied}


def check_cancelled(
    phase: str, ranks: Sequence[PhaseSeen], plain: Sequence[ReferenceStep], cancelled: Collection[str]
) -> list[Check]:
    """Checks that gradients which are zero by algebra are so on the ranks and on one process; no check without any.

    The error is the gradient's norm as a share of all gradients' norm.
    """
    shares: dict[str, float] = {}
    for step, seen in enumerate(plain):
        total = total_norm(seen.gradients.values())
        sides = [("one process", norm(seen.gradients[name]), name) for name in cancelled]
        pieces = [piece for rank in ranks for piece in rank.steps[step].gradients if piece.name in cancelled]
        sides += [("a rank", norm(piece.value), piece.name) for piece in pieces]
        shares |= {f"{name} on {side} (step {step + 1})": size / total for side, size, name in sides}
    return [Check(phase, "gradients that cancel", *largest(shares), CANCELLED_BOUND)] if shares else []


def check_gradients(
    phase: str,
    ranks: Sequence[PhaseSeen],
    plain: Sequence[ReferenceStep],
    left_out: Collection[str],
    nudged: Callable[[int], Sequence[Mapping[str, Tensor]]],
) -> Check:
    """Compares every logical tensor's gradient in every step; shows the earliest step that fails, else the worst."""
    checks = [
        check_tensors(
            phase,
            "gradients",
            (piece for rank in ranks for piece in rank.steps[step].gradients),
            plain[step].gradients,
            GRADIENT_BOUND,
            f" (step {step + 1})",
            left_out,
            functools.partial(nudged, step),
        )
        for step in range(len(plain))
    ]
    failed = [check for check in checks if not check.passed]
    return failed[0] if failed else max(checks, key=lambda check: check.error)


def check_exact(phase: str, name: str, pieces: Iterable[TensorBox], theirs: Mapping[str, Tensor]) -> Check:
    """Compares every logical tensor bit for bit; shows the first in execution order that differs, and by how much."""
    ours, failed = whole_or_failed(phase, name, pieces, shapes_of(theirs))
    if ours is None:
        assert failed is not None
        return failed
    differing = [key for key in execution_order(theirs) if not torch.equal(ours[key], theirs[key])]
    if not differing:
        return Check(phase, name, f"all {len(theirs)} tensors", 0.0, 0.0)
    first = differing[0]
    error = float((ours[first].double() - theirs[first].double()).abs().max())
    return Check(phase, name, first, error if error > 0 else math.inf, 0.0, f"{len(differing)} tensors differ")


def check_series(
    phase: str,
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    first_step: int = 1,
    nudged: Callable[[], Sequence[Sequence[float]]] | None = None,
) -> Check:
    """Compares one number of each step, by relative difference; shows the earliest step that fails, else the worst.

    ``nudged`` gives, for each draw, the numbers of one process whose weights are nudged (launcher.prove.rounding).
    """
    errors = series_errors(ours, theirs, first_step)
    draws = None if nudged is None else lambda: [series_errors(drawn, theirs, first_step) for drawn in nudged()]
    bounds = bounds_for(LOSS_BOUND, errors, draws)
    failed = [step for step, error in errors.items() if not error <= bounds.of(step)]
    step = failed[0] if failed else largest(errors)[0]
    a, b = dict(zip(errors, zip(ours, theirs, strict=True), strict=True))[step]
    note = f"{a:.7g}, one process {b:.7g}" if failed else bounds.note(step)
    return Check(phase, name, step, errors[step], bounds.of(step), note)


def series_errors(ours: Sequence[float], theirs: Sequence[float], first_step: int) -> dict[str, float]:
    """Each step's relative difference."""
    return {f"step {step}": relative(a, b) for step, (a, b) in enumerate(zip(ours, theirs, strict=True), first_step)}


def check_heldout(
    phase: str,
    ours: Mapping[str, Mapping[str, float]],
    theirs: Mapping[str, float],
) -> Check:
    """Compares each rank's held-out loss (moment -> rank -> loss) with one process's at each moment of ``theirs``.

    The error is relative; the first moment that fails is shown, else the worst.
    """
    shown: list[Check] = []
    for moment, truth in theirs.items():
        rank, error = farthest_rank(ours, moment, truth)
        note = f"{ours[moment][rank]:.7g}, one process {truth:.7g}" if moment in ours else "was not evaluated"
        check = Check(phase, HELDOUT, f"{moment}, {rank}", error, LOSS_BOUND, note)
        shown.append(check if not check.passed else replace(check, worst=moment, note=""))
    failed = [check for check in shown if not check.passed]
    return failed[0] if failed else max(shown, key=lambda check: check.error)


def farthest_rank(ours: Mapping[str, Mapping[str, float]], moment: str, truth: float) -> tuple[str, float]:
    """The rank whose held-out loss at ``moment`` is the farthest from ``truth``, and its relative distance."""
    return largest({rank: relative(loss, truth) for rank, loss in ours.get(moment, {"no rank": math.nan}).items()})


def check_left_alone(phase: str, ranks: Sequence[RankSeen]) -> Check:
    """Checks that evaluation changes nothing on any rank: weights, optimizer states, gradients and router biases.

    The error is the number of tensors that were changed.
    """
    changed = [
        f"{name}, {moment}, on {rank.place}"
        for rank in ranks
        for moment, seen in rank.phases[phase].evaluations.items()
        for name in seen.changed
    ]
    count = sum(len(rank.phases[phase].evaluations) for rank in ranks)
    worst = changed[0] if changed else f"{count} evaluations"
    return Check(phase, "evaluation changes nothing", worst, float(len(changed)), 0.0)


def check_rows_agree(phase: str, ranks: Sequence[RankSeen], keys: Sequence[str]) -> Check:
    """Checks that every rank reports exactly the same metrics, since one collective gave them to all.

    ``keys`` are names in a row of metrics, or patterns for them, such as "mtp/loss_*".
    """
    reference = [step.row for step in ranks[0].phases[phase].steps]
    for rank in ranks[1:]:
        for number, (step, expected) in enumerate(zip(rank.phases[phase].steps, reference, strict=True)):
            for key in (key for key in expected if any(fnmatchcase(key, pattern) for pattern in keys)):
                if not same(step.row[key], expected[key]):
                    error = relative(step.row[key], expected[key])
                    return Check(phase, "ranks agree", f"{key} on {rank.place} (step {number + 1})", error, 0.0)
    return Check(phase, "ranks agree", f"{len(ranks)} ranks", 0.0, 0.0)


def same(a: float, b: float) -> bool:
    """Equal, or both not a number."""
    return a == b or (math.isnan(a) and math.isnan(b))


def check_samples(phase: str, ranks: Sequence[RankSeen], expected: Sequence[Mapping[int, str]]) -> Check:
    """Checks that each sample of a step is read at one place on the dp axis alone, and as one process reads it.

    The error is the number of samples that are missing, repeated, foreign or different.
    """
    wrong = 0
    worst = ""
    for step, truth in enumerate(expected):
        readers: dict[int, set[int]] = {}
        for rank in ranks:
            for sample, digest in rank.phases[phase].steps[step].samples.items():
                readers.setdefault(sample, set()).add(rank.reads_as)
                if truth.get(sample) != digest:
                    wrong, worst = wrong + 1, worst or f"sample {sample} on {rank.place} (step {step + 1}) is another"
        for sample in truth:
            count = len(readers.get(sample, ()))
            if count != 1:
                wrong += 1
                worst = worst or f"sample {sample} is read by {count} ranks of dp (step {step + 1})"
    return Check(phase, "samples read", worst or f"{sum(map(len, expected))} samples", float(wrong), 0.0)


def check_counts(phase: str, rows: Sequence[Mapping[str, object]], plain: Sequence[ReferenceStep]) -> Check:
    """Checks that each expert processed exactly as many token-expert pairs of the whole batch as on one process.

    The error is the largest miscount, or the number of dropped pairs, in pairs.
    """
    worst, largest_miss = "every layer and step", 0
    for step, (row, seen) in enumerate(zip(rows, plain, strict=True)):
        for layer, counts_E in seen.counts.items():
            shares = torch.tensor(row[f"moe/layer_{layer:02d}/load"], dtype=torch.float64)
            ours_E = (shares * int(counts_E.sum())).round()
            miss = int((ours_E - counts_E).abs().max())
            if row["moe/dropped"]:
                miss = max(miss, int(str(row["moe/dropped"])))
            if miss > largest_miss:
                worst, largest_miss = f"layer {layer} (step {step + 1})", miss
    return Check(phase, "router counts", worst, float(largest_miss), 0.0)


def check_metrics(
    phase: str,
    keys: Iterable[str],
    rows: Sequence[Mapping[str, float]],
    plain: Sequence[ReferenceStep],
    nudged: Callable[[], Sequence[Sequence[ReferenceStep]]],
) -> Check:
    """Compares the layers' metrics under ``keys``, by relative difference; shows the first that fails, else the worst.

    ``nudged`` gives, for each draw, the steps of one process whose weights are nudged (launcher.prove.rounding).
    """
    shown: list[Check] = []
    for key in keys:
        ours, theirs = [row[key] for row in rows], [step.metrics[key] for step in plain]
        draws = functools.partial(lambda key: [[step.metrics[key] for step in run] for run in nudged()], key)
        check = check_series(phase, "other metrics", ours, theirs, nudged=draws)
        shown.append(replace(check, worst=f"{key} ({check.worst})"))
    failed = [check for check in shown if not check.passed]
    return failed[0] if failed else max(shown, key=lambda check: check.error)


def check_biases(
    phase: str,
    ranks: Sequence[RankSeen],
    buffers: Callable[[RankSeen], Mapping[str, Tensor]],
    plain: Mapping[str, Tensor],
) -> Check:
    """Compares the routers' selection biases on every rank with one process's, by absolute difference."""
    worst, error = "every rank", 0.0
    for rank in ranks:
        for name, buffer in buffers(rank).items():
            miss = float((buffer - plain[name]).abs().max())
            if not miss <= error:
                worst, error = f"{name} on {rank.place}", miss
    return Check(phase, "router biases", worst, error, BIAS_BOUND)


def check_choices(phase: str, replayed: Sequence[Replayed]) -> Check:
    """Checks the experts chosen for every token, ties apart, which were replayed.

    The error is the number of choices that differ, and of tokens that one process never saw.
    """
    wrong = sum(seen.wrong + seen.strangers for seen in replayed)
    ties, tokens = sum(seen.ties for seen in replayed), sum(seen.tokens for seen in replayed)
    layers = [seen.wrong_layer for seen in replayed if seen.wrong_layer is not None]
    gap = max(seen.largest_gap for seen in replayed)
    if not wrong:
        return Check(phase, "router choices", f"{tokens} choices", 0.0, 0.0, f"{ties} ties replayed")
    where = f"layer {min(layers)}, gap {gap:.1e}" if layers else "tokens that one process never saw"
    return Check(phase, "router choices", where, float(wrong), 0.0, f"{ties} ties replayed")


def check_updates(
    phase: str,
    name: str,
    pieces: Iterable[TensorBox],
    theirs: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    bound: float,
    steps: Sequence[ReferenceStep] = (),
    left_out: Collection[str] = (),
    nudged: Nudged | None = None,
) -> Check:
    """Compares every logical tensor's change since ``start`` with one process's, relative to that change's norm.

    Elements whose gradients in some of ``steps`` are so small (TINY) that rounding decides the update are left out, as
    are the tensors ``left_out``. ``nudged`` gives, for each draw, the weights of one process whose weights are nudged;
    where these move farther, ``bound`` is raised for the tensor, to MOST_DRIFT times ``bound`` at most.
    """
    ours, failed = whole_or_failed(phase, name, pieces, shapes_of(theirs))
    if ours is None:
        assert failed is not None
        return failed
    told = {key: told_elements([step.gradients[key] for step in steps]) for key in theirs if key not in left_out}

    def changes(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: (weights[key].double() - start[key].double()) * mask for key, mask in told.items()}

    truth = changes(theirs)
    errors = tensor_errors(changes(ours), truth)
    moves = moves_of(None if nudged is None else lambda: [changes(weights) for weights in nudged()], truth)
    worst, bound, note = held_to(errors, bounds_for(bound, errors, moves, MOST_DRIFT))
    notes = [f"left out, for a gradient of rounding alone: {', '.join(left_out)}"] if left_out else []
    return Check(phase, name, worst, errors[worst], bound, "; ".join([*notes, *([note] if note else [])]))


def told_elements(gradients: Sequence[Tensor]) -> Tensor:
    """A boolean mask of the elements whose gradient is at least TINY of its tensor's root mean square in every step."""
    if not gradients:
        return torch.tensor(True)
    large = [gradient.abs() >= TINY * gradient.square().mean().sqrt() for gradient in gradients]
    return torch.stack(large).all(0)


def without_gradient(steps: Sequence[ReferenceStep]) -> list[str]:
    """The names of tensors whose gradient is nothing but rounding in some step, or zero in every step."""
    totals = [total_norm(step.gradients.values()) for step in steps]
    found = []
    for name in steps[0].gradients:
        sizes = [norm(step.gradients[name]) for step in steps]
        is_rounding = (0 < size <= ROUNDING_SHARE * total for size, total in zip(sizes, totals, strict=True))
        if any(is_rounding) or not any(sizes):
            found.append(name)
    return found


def step_boxes(ranks: Sequence[PhaseSeen], step: Callable[[PhaseSeen], StepSeen | None]) -> list[TensorBox]:
    """All ranks' pieces of the gradients of one step."""
    return [piece for rank in ranks for seen in [step(rank)] if seen is not None for piece in seen.gradients]


def largest(errors: Mapping[str, float]) -> tuple[str, float]:
    """The name with the largest error; what is not a number counts as infinite."""
    name = max(errors, key=lambda key: math.inf if math.isnan(errors[key]) else errors[key])
    return name, errors[name]


def relative(ours: float, theirs: float) -> float:
    """|ours - theirs| / |theirs|; infinite where ours is not finite, absolute where theirs is zero."""
    if not math.isfinite(ours) or not math.isfinite(theirs):
        return 0.0 if same(ours, theirs) else math.inf
    difference = abs(ours - theirs)
    return difference / abs(theirs) if theirs else difference
