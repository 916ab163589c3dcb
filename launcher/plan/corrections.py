"""Corrections of plans by measured runs on the same hardware, kept in one file of the user, each with its origin."""

import dataclasses
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data.errors import reason_of
from launcher.config.yaml_text import read_yaml_file
from launcher.errors import UserError
from launcher.new_file import new_file

Engine = Literal["closed_forms", "traced"]  # what made a plan
ENGINES: tuple[Engine, ...] = ("closed_forms", "traced")
STEP, MEMORY = "step_seconds", "tensor_bytes"  # the terms that are corrected
HEAD = "# Written by `roundtable plan --calibrate RUN`; `roundtable plan --forget NAME` removes a part of it.\n"


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What one run measured, beside what uncorrected plans say of that run."""

    name: str  # the run's name and the beginning of its config's hash
    run: str  # its directory
    date: str  # of the calibration, as 2026-11-23
    config_sha256: str
    hardware: str  # the name of the GPU's hardware file
    device: str  # the device's name in torch
    gpus: int
    kind: Literal["dense", "MoE"]
    steps: int  # the number of steps whose median was taken
    measured: Mapping[str, float]  # term -> value
    planned: Mapping[Engine, Mapping[str, float]]  # engine -> term -> value

    def ratio(self, engine: Engine, term: str) -> float | None:
        """Measured over planned; None where one of them is not known."""
        planned, measured = self.planned.get(engine, {}).get(term), self.measured.get(term)
        return measured / planned if planned and measured else None

    @property
    def origin(self) -> str:
        """The run, date, GPUs, kind of model, config and steps that the correction comes from, in words."""
        gpus = f"{self.gpus} {self.hardware}"
        return f"{self.name} ({self.date}, {gpus}, {self.kind}, config {self.config_sha256}, {self.steps} steps)"


def corrections_file() -> Path:
    """The path of the file of corrections: roundtable/calibrations.yaml in XDG_CONFIG_HOME, or in ~/.config."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(folder) / "roundtable" / "calibrations.yaml"


def read_corrections() -> list[Correction]:
    """All corrections kept so far; none where there is no file. Raises UserError where the file holds anything else."""
    path = corrections_file()
    if not os.path.isfile(path):
        return []
    tree = read_yaml_file(path)
    rows = tree.get("calibrations") if isinstance(tree, Mapping) else None
    found = [_read(row) for row in rows] if isinstance(rows, list) else [None]
    if any(each is None for each in found):
        rule = "must hold what `roundtable plan --calibrate` wrote"
        raise UserError([f"{path} {rule}; mend it, or remove the file and calibrate again"])
    return [each for each in found if each is not None]


def _read(row: Any) -> Correction | None:
    """One row of the file as a correction; None where it is not one."""
    fields = {each.name: each for each in dataclasses.fields(Correction)}
    if not isinstance(row, Mapping) or row.keys() != fields.keys() or row["kind"] not in ("dense", "MoE"):
        return None
    planned = row["planned"]
    if not isinstance(planned, Mapping):
        return None
    values = [row["measured"], *planned.values()]
    if not all(isinstance(each, Mapping) and all(_is_amount(value) for value in each.values()) for each in values):
        return None
    texts = ("name", "run", "date", "config_sha256", "hardware", "device")
    is_right = all(isinstance(row[name], str) for name in texts) and all(
        type(row[name]) is int for name in ("gpus", "steps")
    )
    return Correction(**row) if is_right else None


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def keep(correction: Correction) -> Path:
    """Adds a correction to the file, replacing one of the same name, and returns the file's path.

    Raises UserError where the file cannot be read or written.
    """
    others = [each for each in read_corrections() if each.name != correction.name]
    return _write([*others, correction])


def forget(name: str) -> Path:
    """Removes a correction from the file and returns the file's path. Raises UserError where none has that name."""
    found = read_corrections()
    if name not in {each.name for each in found}:
        known = ", ".join(each.name for each in found) or "none"
        raise UserError([f"--forget={name} must name a calibration; there are: {known}"])
    return _write([each for each in found if each.name != name])


def _write(corrections: Sequence[Correction]) -> Path:
    from ruamel.yaml import YAML

    path, text = corrections_file(), io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    yaml.dump({"calibrations": [dataclasses.asdict(each) for each in corrections]}, text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as partial:
            partial.write_text(HEAD + text.getvalue())
    except OSError as error:
        raise UserError(
            [f"{path} must be a file that can be written ({reason_of(error)}); see XDG_CONFIG_HOME"]
        ) from None
    return path


@dataclass(frozen=True)
class Factors:
    """The factors by which a plan's time and memory are multiplied, and the runs that they come from."""

    step: float = 1.0
    memory: float = 1.0
    origins: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.origins)

    @property
    def words(self) -> str:
        """The factors and the runs that they come from, in one line."""
        return f"corrected: time x {self.step:.3f}, memory of tensors x {self.memory:.3f}, by {'; '.join(self.origins)}"


def factors_for(hardware: str, kind: str, engine: Engine) -> Factors:
    """The geometric means of measured over planned, by all corrections of this kind (dense or MoE) on this hardware.

    They are 1 where there are none. Raises UserError where the file of corrections is damaged.
    """
    mine = [each for each in read_corrections() if each.hardware == hardware and each.kind == kind]
    ratios = {term: [ratio for each in mine if (ratio := each.ratio(engine, term))] for term in (STEP, MEMORY)}
    origins = [each.origin for each in mine if any(each.ratio(engine, term) for term in (STEP, MEMORY))]
    return Factors(_mean(ratios[STEP]), _mean(ratios[MEMORY]), tuple(origins))


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def corrected(plan: dict[str, Any], factors: Factors) -> dict[str, Any]:
    """A traced plan (JSON) with time, memory and all that follows from them corrected, and the values before that."""
    if not factors:
        return plan
    step, memory = factors.step, factors.memory
    before = {key: plan[key] for key in ("step_seconds", "peak_bytes", "fits")}
    peak = round(plan["peak_bytes"] * memory)
    scaled = {
        key: plan[key] * step for key in ("step_seconds", "hours", "gpu_hours", "energy_kwh", "cost") if plan[key]
    }
    return {
        **plan,
        **scaled,
        **{key: plan[key] / step for key in ("tokens_per_second", "mfu")},
        "peak_bytes": peak,
        "fits": peak <= plan["memory_bytes"],
        "corrections": {"step_seconds": step, "peak_bytes": memory, "from": list(factors.origins), "before": before},
    }
