"""The figures of the page: which number each shows, in which section, and how it is drawn."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Panel:
    """One figure with a curve of each run."""

    key: str
    title: str
    unit: str = ""
    section: str = "training"  # training, speed, experts, data or others
    log: bool = False
    zero: bool = False  # the axis begins at 0
    noisy: bool = False  # smoothed where the reader turns smoothing on


KNOWN = (
    Panel("loss", "Loss", "nats per token; points: held out", noisy=True),
    Panel("lr", "Learning rate", zero=True),
    Panel("grad_norm", "Gradient norm", "before clipping", log=True, noisy=True),
    Panel("batch_size", "Batch size", "sequences", zero=True),
    Panel("loss_scale", "Loss scale", "fp16", log=True),
    Panel("z_loss", "z-loss of the head", "before its coefficient", noisy=True),
    Panel("tokens_per_second", "Tokens per second", "all devices", section="speed", zero=True, noisy=True),
    Panel("mfu", "MFU", "part of the devices' peak", section="speed", zero=True, noisy=True),
    Panel("step_seconds", "Time of a step", "seconds", section="speed", zero=True, noisy=True),
    Panel("loader_wait_seconds", "Waiting for samples", "seconds of a step", section="speed", zero=True, noisy=True),
    Panel("peak_gib", "Peak memory", "GiB, rank 0", section="speed", zero=True),
    Panel("moe/busiest", "Busiest expert of all layers", "load; 1 is balanced", section="experts", noisy=True),
    Panel(
        "moe/least_busy", "Least busy expert of all layers", "load; 0 is idle", section="experts", zero=True, noisy=True
    ),
    Panel("moe/idle", "Idle experts", "part of all layers' experts", section="experts", zero=True, noisy=True),
    Panel("moe/balance_loss", "Balance loss", "before its coefficient", section="experts", noisy=True),
    Panel("moe/z_loss", "z-loss of the routers", "before its coefficient", section="experts", noisy=True),
)
SECTIONS = ("training", "speed", "experts", "data", "others")


def panels_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures for which these runs have a curve, section by section."""
    keys = dict.fromkeys(key for run in runs for key in run.get("curves", {}))
    known = {panel.key: panel for panel in KNOWN}
    found = [panel for panel in KNOWN if panel.key in keys] + [_other(key) for key in keys if key not in known]
    return [asdict(panel) for section in SECTIONS for panel in found if panel.section == section]


def _other(key: str) -> Panel:
    """The figure of a key that is not in KNOWN."""
    if key.startswith("data/") and key.endswith("/epoch"):
        source = key.removeprefix("data/").removesuffix("/epoch")
        return Panel(key, f"Epochs of {source}", "passes over the source", section="data", zero=True)
    if key.startswith("mtp/loss_"):
        return Panel(key, f"Loss, {key.removeprefix('mtp/loss_')} further ahead", "nats per token", noisy=True)
    return Panel(key, key, section="experts" if key.startswith("moe/") else "others", noisy=True)
