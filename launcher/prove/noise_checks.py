"""The checks of a proof in 8 and 16 bits: errors are measured in units of one process's own distance from fp32."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from launcher.prove.checks import (
    HELDOUT,
    Check,
    farthest_rank,
    held_to,
    relative,
    series_errors,
    shapes_of,
    whole_or_failed,
)
from launcher.prove.compare.boxes import TensorBox
from launcher.prove.compare.errors import tensor_errors
from launcher.prove.rank import RankSeen
from launcher.prove.rounding import NOISE_FACTOR, Moves, Nudged, bounds_for

MOST_NOISE = 10  # how many times NOISE_FACTOR a bound may become, where other roundings of one process move it farther


def check_noisy_gradients(
    phase: str,
    pieces: Iterable[TensorBox],
    low: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    step: str,
    name: str = "gradients",
    anew: Nudged | None = None,
) -> Check:
    """Compares gradients in 16 bits: each one's distance from fp32, as a multiple of one process's in that precision.

    The multiple's base is the larger of one process's distance for the tensor and its median over tensors, since a
    small tensor's may be small by chance. The bound is NOISE_FACTOR. Where it is exceeded, it is raised to NOISE_FACTOR
    times the farthest of ``anew``, one process's gradients with weights rounded otherwise; at most MOST_NOISE times.
    """
    ours, failed = whole_or_failed(phase, name, pieces, shapes_of(exact))
    if ours is None:
        assert failed is not None
        return failed
    noise = tensor_errors(low, exact)
    usual = statistics.median(noise.values())

    def multiples(gradients: Mapping[str, Tensor]) -> dict[str, float]:
        return {key: error / max(noise[key], usual) for key, error in tensor_errors(gradients, exact).items()}

    errors = multiples(ours)
    draws = None if anew is None else lambda: [multiples(gradients) for gradients in anew()]
    worst, bound, more = held_to(errors, bounds_for(NOISE_FACTOR, errors, draws, MOST_NOISE))
    base = max(noise[worst], usual)
    note = f"{errors[worst] * base:.1e} from fp32, one process {noise[worst]:.1e}"
    return Check(phase, name, f"{worst}{step}", errors[worst], bound, note + (otherwise(bound, base) if more else ""))


def check_noise_is_there(
    phase: str, name: str, pieces: Iterable[TensorBox], low: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> Check:
    """Checks that the layout computes in the low precision at all: its gradients lie about as far from fp32.

    The error is one process's median distance from fp32 as a multiple of the layout's; the bound is NOISE_FACTOR.
    """
    ours, failed = whole_or_failed(phase, name, pieces, shapes_of(exact))
    if ours is None:
        assert failed is not None
        return failed
    found, wanted = (statistics.median(tensor_errors(each, exact).values()) for each in (ours, low))
    note = f"the layout lies {found:.1e} from fp32, one process {wanted:.1e}"
    return Check(phase, name, "median tensor", wanted / found if found else math.inf, NOISE_FACTOR, note)


def check_noisy_losses(
    phase: str,
    name: str,
    ours: Sequence[float],
    low: Sequence[float],
    exact: Sequence[float],
    floor: float,
    anew: Callable[[], Sequence[Sequence[float]]] | None = None,
) -> Check:
    """Compares losses in 16 bits: each step's distance from fp32, as a multiple of one process's largest distance.

    That largest distance is taken as ``floor`` at least. It may be small by chance, so the bound, NOISE_FACTOR, is
    raised where ``anew``, one process's losses with weights rounded otherwise, lie farther from fp32, to MOST_NOISE
    times at most.
    """

    def distances(losses: Sequence[float]) -> dict[str, float]:
        return series_errors(losses, exact, 1)

    draws = None if anew is None else lambda: [distances(losses) for losses in anew()]
    return held_to_noise(phase, name, distances(ours), loss_noise(low, exact, floor), draws)


def check_noisy_heldout(
    phase: str,
    ours: Mapping[str, Mapping[str, float]],
    exact: Mapping[str, float],
    base: float,
    anew: Callable[[], Sequence[Mapping[str, float]]] | None = None,
) -> Check:
    """Compares held-out losses in 16 bits (moment -> rank -> loss): at each moment the rank farthest from fp32.

    The distances are multiples of ``base``. The bound is NOISE_FACTOR, raised where ``anew``, one process's losses
    (moment -> loss) with weights rounded otherwise, lie farther from fp32, to MOST_NOISE times at most.
    """
    worst = {moment: farthest_rank(ours, moment, truth) for moment, truth in exact.items()}
    errors = {moment: error for moment, (_, error) in worst.items()}

    def distances(losses: Mapping[str, float]) -> dict[str, float]:
        return {moment: relative(losses[moment], truth) for moment, truth in exact.items()}

    draws = None if anew is None else lambda: [distances(losses) for losses in anew()]
    check = held_to_noise(phase, HELDOUT, errors, base, draws)
    if check.passed:
        return check
    note = check.note if check.worst in ours else "was not evaluated"
    return replace(check, worst=f"{check.worst}, {worst[check.worst][0]}", note=note)


def held_to_noise(phase: str, name: str, distances: Mapping[str, float], base: float, draws: Moves | None) -> Check:
    """The check of losses' distances from fp32, by step or moment. These and ``draws`` are divided by ``base``."""

    def multiples(distances: Mapping[str, float]) -> dict[str, float]:
        return {key: distance / base for key, distance in distances.items()}

    errors, moves = multiples(distances), None if draws is None else lambda: [*map(multiples, draws())]
    worst, bound, more = held_to(errors, bounds_for(NOISE_FACTOR, errors, moves, MOST_NOISE))
    note = f"{distances[worst]:.1e} from fp32, one process at most {base:.1e}"
    return Check(phase, name, worst, errors[worst], bound, note + (otherwise(bound, base) if more else ""))


def otherwise(bound: float, base: float) -> str:
    """The end of the note on a bound that draws have raised: their largest distance from fp32, in units of ``base``."""
    return f", {bound / NOISE_FACTOR * base:.1e} with its weights rounded otherwise"


def loss_noise(low: Sequence[float], exact: Sequence[float], floor: float) -> float:
    """The largest relative distance of one process's losses in 16 bits from those in fp32; ``floor`` at least."""
    return max(floor, *(relative(a, b) for a, b in zip(low, exact, strict=True)))


def check_overflow(phase: str, ranks: Sequence[RankSeen]) -> Check:
    """Checks that after an overflow on one rank all skip the step, keep their state, and end at the same loss scale.

    The error is the number of ranks that did not, summed over the overflows.
    """
    wrong: list[str] = []
    for number, first in enumerate(ranks[0].phases[phase].overflows):
        seen = [rank.phases[phase].overflows[number] for rank in ranks]
        least = min(each.scale for each in seen)
        for rank, each in zip(ranks, seen, strict=True):
            if not each.skipped or not each.is_unchanged:
                wrong.append(f"{rank.place} did not skip an overflow on rank {first.at}")
            elif each.scale != least:
                wrong.append(f"{rank.place} is at scale {each.scale:g}, another at {least:g}")
    return Check(phase, "overflow on one rank", wrong[0] if wrong else "skipped by all", float(len(wrong)), 0.0)
