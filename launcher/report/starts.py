"""The starts of a run: number of ranks, layout, batch and environment of each."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.config.tree import RunConfig
from launcher.training.surroundings import FIELDS

AXES = ("tp", "pp", "cp", "ep", "zero")
SHOWN = (*(f"parallel.{axis}" for axis in AXES), "train.global_batch_size", "train.micro_batch_size", "train.precision")
MOST_STARTS = 100  # the last so many starts of a run are shown


@dataclass(frozen=True)
class Start:
    """One start: its event, the values of SHOWN from then on (where known), and the config changes made for it."""

    event: Mapping[str, Any]
    values: Mapping[str, str]
    changed: tuple[str, ...]

    @property
    def step(self) -> int:
        """The step that it went on from."""
        return self.event["step"]

    @property
    def ranks(self) -> int | None:
        """The number of processes of the start; None where it is not recorded."""
        ranks = self.event.get("ranks")
        return ranks if type(ranks) is int and ranks > 0 else None

    @property
    def environment(self) -> Mapping[str, Any]:
        """Versions and device of the start; empty where an older run did not record them."""
        return {key: self.event[key] for key in FIELDS if key in self.event}


def leaves(tree: Any, key: str = "") -> dict[str, str]:
    """Each value of a config by its dotted key, as text."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        return {found: text for name, value in fields.items() for found, text in leaves(value, f"{key}.{name}").items()}
    if isinstance(tree, tuple) and any(dataclasses.is_dataclass(item) for item in tree):
        numbered = enumerate(tree)
        return {found: text for i, item in numbered for found, text in leaves(item, f"{key}.{i}").items()}
    return {key.removeprefix("."): "null" if tree is None else str(tree)}


def starts_of(events: Sequence[Mapping[str, Any]], config: RunConfig | None) -> list[Start]:
    """All starts in order, each with its config values.

    The last start's values are those of ``config``; those of earlier ones follow by undoing each start's changes.
    """
    groups: list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = []
    for event in events:
        if event["event"] == "start":
            groups.append((event, []))
        elif event["event"] == "config_change" and groups:
            groups[-1][1].append(event)
    known = leaves(config) if config is not None else {}
    values = {key: known[key] for key in SHOWN if key in known}
    found = []
    for event, changes in reversed(groups):
        changed = tuple(f"{each.get('key')}: {each.get('from')} to {each.get('to')}" for each in changes)
        found.append(Start(event, dict(values), changed))
        values |= {str(each.get("key")): str(each.get("from")) for each in changes if str(each.get("key")) in values}
    return found[::-1]


def layout_text(start: Start) -> str:
    """The layout of a start in words: `8 ranks: dp 2, tp 2, pp 2, ZeRO 1`."""
    ranks = f"{start.ranks:,} rank{'s' * (start.ranks != 1)}" if start.ranks is not None else "ranks not recorded"
    if not start.values:
        return f"{ranks}; layout not known"
    degrees = {axis: start.values.get(f"parallel.{axis}", "1") for axis in AXES}
    shown = [f"{axis} {degrees[axis]}" for axis in AXES[:-1] if degrees[axis] != "1"]
    dp = _dp(start, degrees)
    shown = [*([f"dp {dp}"] if dp is not None else []), *shown, f"ZeRO {degrees['zero']}"]
    return f"{ranks}: {', '.join(shown)}"


def _dp(start: Start, degrees: Mapping[str, str]) -> int | None:
    """The number of data-parallel replicas, computed from the ranks and the other degrees; None where unknown."""
    axes = [degrees[axis] for axis in ("tp", "pp", "cp")]
    if start.ranks is None or not all(degree.isdecimal() and int(degree) for degree in axes):
        return None
    others = int(axes[0]) * int(axes[1]) * int(axes[2])
    return start.ranks // others if start.ranks % others == 0 else None


def batch_text(start: Start) -> str:
    """The batch and the precision in words."""
    values = start.values
    if not values:
        return "not known"
    sizes = f"{values['train.global_batch_size']} sequences, {values['train.micro_batch_size']} at a time"
    return f"{sizes}; {values['train.precision']}"
