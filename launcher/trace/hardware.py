"""Reads GPUs' published peak rates, and the fractions that kernels reach, from configs/hardware/NAME.yaml."""

import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from launcher.config.yaml_text import read_yaml_file
from launcher.errors import UserError
from launcher.trace.parts import COPIES
from launcher.trace.roofline import Rates
from modeling.precision_config import Precision

FOLDER = Path(str(resources.files("launcher.estimate"))) / "files"  # in the source tree a link to configs/hardware
GB = 1e9
FAMILIES = ("ampere", "hopper", "blackwell", "cdna")


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of the stated peaks that kernels reach, from 0 to 1."""

    products: float
    grouped_products: float
    attention_forward: float
    attention_backward: float
    memory: float
    links: float


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU with its stated peak rates and the efficiency that kernels reach."""

    name: str
    torch_name: str
    memory_gb: float
    peak_flops: Mapping[str, float]  # dtype -> FLOP/s
    memory_bytes_per_second: float
    node_bytes_per_second: float
    network_bytes_per_second: float
    launch_seconds: float
    efficiency: Efficiency
    # Fields that only closed forms read (launcher.closed_form.gpus); a file may leave them out.
    family: str = "hopper"
    multiprocessors: float = 132.0
    flops_of_exponential: float = 256.0  # bf16 FLOPs of products at the peak rate in the time of one exponential
    watts: float | None = None  # of the board
    host_bytes_per_second: float | None = None  # between its memory and the host's, one way
    nvlink_gpus: float = 8.0  # GPUs that the fast links join
    also: tuple[str, ...] = ()  # other names of this GPU in published tables
    low_precision_flops: Mapping[str, float] = field(default_factory=dict)  # fp8, fp4 -> FLOP/s

    def check_fp8(self, precision: Precision) -> None:
        """Raises UserError where ``precision`` is fp8 and this GPU's file has no rate for it."""
        if precision == "fp8" and "fp8" not in self.low_precision_flops:
            rule = f"has no rate on {self.name}, whose file names none in low_precision_flops"
            raise UserError([f"train.precision=fp8 {rule}; plan for an H100, or try train.precision=bf16"])

    def rates(self, wires: Mapping[str, bool]) -> Rates:
        """The rates that kernels reach: peak times efficiency. ``wires``: part -> whether its ranks share one node."""
        reached = self.efficiency
        links = {True: self.node_bytes_per_second, False: self.network_bytes_per_second}

        host = {} if self.host_bytes_per_second is None else {COPIES: reached.links * self.host_bytes_per_second}

        def of_peak(share: float) -> dict[str, float]:
            return {dtype: share * flops for dtype, flops in {**self.peak_flops, **self.low_precision_flops}.items()}

        return Rates(
            name=self.name,
            products=of_peak(reached.products),
            grouped_products=of_peak(reached.grouped_products),
            attention_forward=of_peak(reached.attention_forward),
            attention_backward=of_peak(reached.attention_backward),
            bandwidth=reached.memory * self.memory_bytes_per_second,
            launch_seconds=self.launch_seconds,
            wires={part: reached.links * links[is_near] for part, is_near in wires.items()} | host,
            peak=self.peak_flops,
        )


def must(one: Field[Any]) -> bool:
    """Whether a file must give the field."""
    return one.default is MISSING and one.default_factory is MISSING


def known_hardware() -> list[str]:
    """The names of the GPUs that have a file in configs/hardware, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def hardware_called(name: str) -> Hardware | None:
    """The GPU that Slurm or a table calls ``name``, in upper or lower case; None where no file has the name.

    Both the files' names and the names in ``also`` count.
    """
    wanted = name.lower().replace("_", "-")
    found = (read_hardware(each) for each in known_hardware())
    return next((each for each in found if wanted in {one.lower() for one in (each.name, *each.also)}), None)


def read_hardware(name: str, option: str = "--as") -> Hardware:
    """The GPU of that name, in upper or lower case, or of the YAML file at that path.

    ``option``: where the name was given, for messages. Raises UserError where the GPU is unknown or its file is wrong.
    """
    is_path = name.endswith((".yaml", ".yml"))
    known = {each.lower(): each for each in known_hardware()}
    if not is_path and name.lower() not in known:
        raise UserError(
            [f"{option}={name} must be one of {', '.join(known.values())}, or the path of a YAML file like them"]
        )
    path = Path(name) if is_path else FOLDER / f"{known[name.lower()]}.yaml"
    if not os.path.isfile(path):
        raise UserError([f"{option}={name} must be a YAML file that is there; try one of {', '.join(known.values())}"])
    return checked(path.stem, read_yaml_file(path), f"{option}={name}")


def checked(name: str, tree: Any, given: str) -> Hardware:
    """The GPU described by a file's keys. Raises UserError with a line for each missing, unknown or invalid key."""
    tree = dict(tree) if isinstance(tree, Mapping) else {}
    shares = tree.get("efficiency") if isinstance(tree.get("efficiency"), Mapping) else {}
    peaks = tree.get("peak_flops") if isinstance(tree.get("peak_flops"), Mapping) else {}
    wanted = [each.name for each in fields(Hardware) if each.name not in ("name", "torch_name") and must(each)]
    further = [each.name for each in fields(Hardware) if not must(each)]
    numbers = {key: tree.get(key) for key in wanted if key not in ("efficiency", "peak_flops")}
    numbers |= {
        key: tree[key]
        for key in ("multiprocessors", "flops_of_exponential", "watts", "nvlink_gpus", "host_bytes_per_second")
        if key in tree
    }
    low = tree.get("low_precision_flops") if isinstance(tree.get("low_precision_flops"), Mapping) else {}
    numbers |= {f"low_precision_flops.{key}": value for key, value in low.items()}
    numbers |= {f"efficiency.{each.name}": shares.get(each.name) for each in fields(Efficiency)}
    numbers |= {f"peak_flops.{dtype}": peaks.get(dtype) for dtype in {"bf16": None, **peaks}}
    problems = [
        f"{given}: {key}={value} must be a number above 0; see configs/hardware for files that are right"
        for key, value in numbers.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf")
    ]
    unknown = [key for key in tree if key not in (*wanted, *further, "torch_name")] + [
        f"efficiency.{key}" for key in shares if key not in {each.name for each in fields(Efficiency)}
    ]
    problems += [f"{given}: {key} is no key of a GPU's file; leave it out" for key in unknown]
    if tree.get("family", "hopper") not in FAMILIES:
        rule = f"must be one of {', '.join(FAMILIES)}, whose shares of peaks are known"
        problems.append(f"{given}: family={tree['family']} {rule}; give the nearest")
    if not isinstance(tree.get("also", []), list):
        problems.append(f"{given}: also={tree['also']} must be a list of names; try [{tree['also']}]")
    if not isinstance(tree.get("low_precision_flops", {}), Mapping):
        rates = tree["low_precision_flops"]
        problems.append(f"{given}: low_precision_flops={rates} must be rates by format; try {{fp8: {rates}}}")
    problems += [
        f"{given}: efficiency.{key}={value} must be at most 1: it is a share of the peak"
        for key, value in shares.items()
        if isinstance(value, int | float) and value > 1
    ]
    if problems:
        raise UserError(problems)
    plain: dict[str, Any] = {key: float(numbers[key]) for key in (*wanted, *further) if key in numbers}
    if "family" in tree:
        plain["family"] = str(tree["family"])
    also = tree.get("also")
    return Hardware(
        name=name,
        torch_name=str(tree.get("torch_name", name)),
        peak_flops={dtype: float(flops) for dtype, flops in peaks.items()},
        also=tuple(str(each) for each in also) if isinstance(also, list | tuple) else (),
        low_precision_flops={str(key): float(value) for key, value in low.items()},
        efficiency=Efficiency(**{key: float(value) for key, value in shares.items()}),
        **plain,
    )
