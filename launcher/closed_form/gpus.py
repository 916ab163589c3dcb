"""The GPU of a published row: its file in configs/hardware, changed by the row's words on power, memory and network."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from launcher.closed_form.architecture import CannotPlan
from launcher.config.yaml_text import read_yaml_file
from launcher.trace.hardware import FOLDER, Hardware, checked, known_hardware

GBIT = 1e9 / 8
GIB = 2.0**30
HBM2E_SHARE = 2.4 / 3.35  # of the bandwidth of an H100 with HBM3: torchtitan's GPUs (arXiv 2410.06511, section 3.1)
# A busy GPU's clock depends on its power limit, about as the square root: power grows with f V^2. WATTS_OF_TFLOPS has
# the watts for a TFLOP/s in 16 bits of each family's first GPU, to which others are compared.
CLOCK_POWER = 0.5
UNKNOWN_WATTS = 700.0  # of a GPU whose file has none
WATTS_OF_TFLOPS = {"ampere": 400 / 312, "hopper": 700 / 989.5, "blackwell": 1200 / 2500, "cdna": 750 / 1307.4}


@dataclass(frozen=True)
class Gpu:
    """A GPU and the links of the machine around it."""

    hardware: Hardware
    node_gpus: int  # GPUs that the fast links join
    network_bytes_per_second: float  # of one GPU, one way
    clock: float  # the clock that its power allows, over the usual one of its family

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products in this precision, at the GPU's clock. Raises CannotPlan where it lacks it."""
        low = self.hardware.low_precision_flops
        name = {"mxfp8": "fp8"}.get(precision, precision)
        rates = {**self.hardware.peak_flops, **low}
        if name not in rates:
            raise CannotPlan(f"{self.hardware.name} has no rate for {precision}")
        return rates[name] * self.clock


def plain(name: str) -> str:
    """A name for comparison: lower case, without the vendor."""
    return re.sub(r"^(nvidia|amd|instinct)[\s-]+", "", name.strip().lower()).replace("_", "-")


@lru_cache
def library() -> dict[str, Hardware]:
    """Every known GPU by each of its names, in plain form."""
    found: dict[str, Hardware] = {}
    for name in known_hardware():
        hardware = checked(name, read_yaml_file(FOLDER / f"{name}.yaml"), name)
        for each in (name, *hardware.also):
            found[plain(each)] = hardware
    return found


def gpu_of(name: str, per_node: int, interconnect: str) -> Gpu:
    """The GPU that a row's ``hw`` names, in nodes of ``per_node``. Raises CannotPlan where it is not known."""
    known, wanted = library(), plain(name)
    bare = re.split(r"[\s(]", wanted)[0]
    hardware = known.get(wanted) or known.get(bare) or known.get(re.sub(r"-\d+(gb)?$", "", bare))
    if hardware is None:
        raise CannotPlan(f"hw.gpu={name!r} is not known; there are {', '.join(known_hardware())}")
    return gpu_like(hardware, per_node, wanted, interconnect)


def gpu_like(hardware: Hardware, per_node: int, words: str = "", interconnect: str = "") -> Gpu:
    """A GPU in nodes of ``per_node``, with the power and memory in ``words`` and the network in ``interconnect``."""
    hardware, clock = with_words(hardware, words)
    node_gpus = int(hardware.nvlink_gpus) if hardware.nvlink_gpus > 8 else per_node
    network = network_of(interconnect, per_node) or hardware.network_bytes_per_second
    return Gpu(hardware, node_gpus, network, clock)


def with_words(hardware: Hardware, words: str) -> tuple[Hardware, float]:
    """The GPU with the memory that ``words`` name, and its clock at the power that they name, over its family's."""
    watts = re.search(r"(\d{3,4})\s*w\b", words)
    stated = hardware.watts or UNKNOWN_WATTS
    power = float(watts[1]) if watts else stated
    usual = WATTS_OF_TFLOPS.get(hardware.family, stated / hardware.peak_flops["bf16"] * 1e12)
    clock = (power / (hardware.peak_flops["bf16"] / 1e12 * usual)) ** CLOCK_POWER
    size = re.match(r"[a-z]+\d+[a-z]*-(\d+)(?:gb)?\b", words)
    if size:
        hardware = replace(hardware, memory_gb=float(size[1]))
    if "hbm2e" in words and hardware.family == "hopper":
        hardware = replace(hardware, memory_bytes_per_second=hardware.memory_bytes_per_second * HBM2E_SHARE)
    return hardware, clock


def network_of(words: str, per_node: int) -> float | None:
    """Bytes/s of one GPU between nodes, read from the row's words; None where they do not say."""
    several = re.search(r"(\d+)\s*x\s*(\d+)\s*(Gb|GB)(?:/s|ps|it)?", words)
    if several:
        rate = int(several[1]) * int(several[2]) * (GBIT if several[3] == "Gb" else 1e9)
        return rate / per_node
    one = re.search(r"(\d+)\s*(?:Gbps|Gb/s)", words)
    if one:
        is_each = re.search(r"per GPU|/GPU", words)
        return int(one[1]) * GBIT / (1 if is_each else per_node)
    speeds = {"XDR": 800, "NDR": 400, "HDR": 200, "EDR": 100}
    return next((speed * GBIT for word, speed in speeds.items() if word in words), None)


def capacity(gpu: Gpu) -> float:
    """Bytes of memory that a process can use: a GPU sold by GB has about as many GiB, less 1% for the driver."""
    return 0.99 * gpu.hardware.memory_gb * GIB
