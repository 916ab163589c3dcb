"""What the sizes' growth with the width says: whether muP is right for an architecture and an optimizer."""

from collections.abc import Iterator, Mapping

from launcher.coords.measure import Coordinates, Parametrization

# Parametrization -> activation -> "sizes" or "changes" -> the power of the width by which it grows.
Slopes = Mapping[Parametrization, Mapping[str, Mapping[str, float]]]

STEEPEST = 0.3  # a power that is no growth: few widths, and means over few tokens, give 0.15 where there is none
# Logits of the head and of routers fall with the root of the width at step 0, and so does what they get from changes of
# their inputs, until their own updates outweigh it (Tensor Programs V, appendix D.1).
STEEPEST_FALL_OF_SCORES = 0.75
SCORES = ("logits", "router")


def slopes_of(measured: Mapping[Parametrization, Coordinates]) -> Slopes:
    """The powers after the last update."""
    found: dict[Parametrization, dict[str, dict[str, float]]] = {}
    for name, coordinates in measured.items():
        updates = len(next(iter(coordinates.sizes.values()))) - 1
        sizes = coordinates.slopes(coordinates.sizes, updates)
        changes = coordinates.slopes(coordinates.changes, updates)
        found[name] = {each: {"sizes": sizes[each], "changes": changes[each]} for each in sizes}
    return found


def faults(slopes: Slopes) -> Iterator[str]:
    """A line for each activation that does not keep its size, or its changes theirs, under muP."""
    for name, powers in slopes["mup"].items():
        fall = STEEPEST_FALL_OF_SCORES if name in SCORES else STEEPEST
        for kind, power in powers.items():
            if not -fall <= power <= STEEPEST:
                yield (
                    f"{name}: {kind} grow with width to the power {power:+.2f} under muP; "
                    f"between {-fall} and {STEEPEST} is flat"
                )
