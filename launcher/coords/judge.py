"""The verdict of the coordinate check: whether activations keep their size over the width under muP."""

from collections.abc import Iterator, Mapping

from launcher.coords.measure import Coordinates, Parametrization

# Parametrization -> activation -> "sizes" or "changes" -> the power of the width by which it grows.
Slopes = Mapping[Parametrization, Mapping[str, Mapping[str, float]]]

STEEPEST = 0.3  # powers up to it are no growth: few widths, and means over few tokens, give 0.15 where there is none
# Logits of the head and of routers fall with the root of the width at step 0, and so do their changes that come from
# changed inputs, until the updates of their own weights outweigh these (Tensor Programs V, appendix D.1).
STEEPEST_FALL_OF_SCORES = 0.75
SCORES = ("logits", "router")


def slopes_of(measured: Mapping[Parametrization, Coordinates]) -> Slopes:
    """The powers of the width by which each activation's size and change grow after the last update."""
    found: dict[Parametrization, dict[str, dict[str, float]]] = {}
    for name, coordinates in measured.items():
        updates = len(next(iter(coordinates.sizes.values()))) - 1
        sizes = coordinates.slopes(coordinates.sizes, updates)
        changes = coordinates.slopes(coordinates.changes, updates)
        found[name] = {each: {"sizes": sizes[each], "changes": changes[each]} for each in sizes}
    return found


def faults(slopes: Slopes) -> Iterator[str]:
    """A line for each activation whose size, or change, does not stay the same over the width under muP."""
    for name, powers in slopes["mup"].items():
        fall = STEEPEST_FALL_OF_SCORES if name in SCORES else STEEPEST
        for kind, power in powers.items():
            if not -fall <= power <= STEEPEST:
                yield (
                    f"{name}: {kind} grow with width to the power {power:+.2f} under muP; "
                    f"between {-fall} and {STEEPEST} is flat"
                )
