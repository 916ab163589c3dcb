"""The events of a run as the page shows them: steps of each kind on a time line, and a table with texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.watch.event_words import fields_text

MOST_PLACES = 1000  # marks of one kind on the time line
MOST_TOLD = 200  # events in the table of a run
LONGEST_TEXT = 600  # characters
MOST_DOCUMENTS = 4  # documents of an event's batch that its text names

# Kinds of events by severity; kinds not listed are notes.
BAD = ("nonfinite", "rollback", "restart", "checkpoint_failed", "damaged_checkpoint", "ranks_ended")
WARNINGS = ("spike", "no_targets", "checkpoint_warning", "straggler", "stopped", "slow_products")
ROUTINE = ("checkpoint",)


@dataclass(frozen=True)
class Told:
    """One event as a row of the table."""

    step: int
    kind: str
    tone: str  # bad, warn, note or routine
    text: str


def tone_of(kind: str) -> str:
    """The severity of a kind of event: bad, warn, routine or note."""
    if kind in BAD:
        return "bad"
    return "warn" if kind in WARNINGS else "routine" if kind in ROUTINE else "note"


def kind_of(event: Mapping[str, Any]) -> str:
    """The event's short name as text of at most 60 characters, even where the file holds something else."""
    return str(event["event"])[:60]


def places(events: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The distinct steps at which each kind happened, sorted; of more than MOST_PLACES an evenly spaced subset."""
    steps: dict[str, set[int]] = {}
    for event in events:
        steps.setdefault(kind_of(event), set()).add(event["step"])
    return {kind: thinned(sorted(found)) for kind, found in steps.items()}


def thinned(steps: list[int]) -> list[int]:
    """At most MOST_PLACES of the steps, evenly spaced, with the first and the last among them."""
    if len(steps) <= MOST_PLACES:
        return steps
    return [steps[number * (len(steps) - 1) // (MOST_PLACES - 1)] for number in range(MOST_PLACES)]


def told(events: Sequence[Mapping[str, Any]]) -> tuple[list[Told], int]:
    """The events of the table, in the order of the file, and the number of events left out.

    More than MOST_TOLD events lose the routine ones; if that is not enough, those in the middle are left out too.
    """
    matter = [event for event in events if kind_of(event) not in ROUTINE]
    chosen = list(events) if len(events) <= MOST_TOLD else matter
    if len(chosen) > MOST_TOLD:
        chosen = [*chosen[: MOST_TOLD // 2], *chosen[-MOST_TOLD // 2 :]]
    lines = [Told(event["step"], kind_of(event), tone_of(kind_of(event)), text_of(event)) for event in chosen]
    return lines, len(events) - len(lines)


def text_of(event: Mapping[str, Any]) -> str:
    """The event's fields as one line, with the first documents of its batch; cut at LONGEST_TEXT characters."""
    fields = fields_text(event)
    documents = event.get("documents")
    if isinstance(documents, list) and documents:
        named = "; ".join(_document(each) for each in documents[:MOST_DOCUMENTS])
        more = f" and {len(documents) - MOST_DOCUMENTS} more" if len(documents) > MOST_DOCUMENTS else ""
        fields += f"  documents: {named}{more}"
    fields = fields.strip()
    return fields if len(fields) <= LONGEST_TEXT else f"{fields[:LONGEST_TEXT]} ..."


def _document(each: Any) -> str:
    if isinstance(each, dict) and {"file", "first", "last"} <= each.keys():
        return f"{each['file']} {each['first']} to {each['last']}"
    return str(each)
