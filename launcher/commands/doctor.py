"""`roundtable doctor`: what this machine has, and what will not work on it.

Libraries are imported in child processes, so that one that crashes or prints does not disturb the report.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from launcher.console import open_console, say
from modeling.kernels.built import compiler_here, words_of

GIB = 2**30
_LIBRARIES = ("deepspeed", "transformers", "tokenizers", "datasets", "safetensors", "wandb")
_IMPORT_TIMEOUT_SECONDS = 120
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_MEMORY_FIELDS = ("MemTotal", "MemAvailable")  # of /proc/meminfo, in KiB

_TORCH_PROBE = """
import json, torch, torch.distributed as dist
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
    "devices": [{"name": d.name, "gib": d.total_memory / 2**30, "capability": [d.major, d.minor]} for d in devices],
}))
"""
_WANDB_PROBE = "from launcher.watch.wandb_run import choose_mode; print(choose_mode('auto'))"


@dataclass(frozen=True)
class Finding:
    """One thing examined. ``fails``: training cannot work here; ``lacks``: something will not work, or is slow."""

    topic: str
    found: str
    verdict: Literal["ok", "lacks", "fails"] = "ok"
    remedy: str = ""


def examine() -> list[Finding]:
    """Every finding about this machine, in the order in which they are shown. Takes seconds: it imports torch."""
    children = {name: _start(f"import {name}") for name in _LIBRARIES}
    torch_child = _start(_TORCH_PROBE)
    wandb_child = _start(_WANDB_PROBE)
    return [
        _python(),
        *_torch(torch_child),
        *(_library(name, child) for name, child in children.items()),
        _wandb_mode(wandb_child),
        _slurm(),
        *_variables(),
        *_processor(),
        _memory(),
        _shared_memory(),
        _disk(),
    ]


def print_report(*, as_json: bool) -> int:
    """Prints the findings as a table, or as JSON; returns 1 if training cannot work here, else 0."""
    findings = examine()
    can_train = all(finding.verdict != "fails" for finding in findings)
    if as_json:
        say(json.dumps({"can_train": can_train, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print_table(findings, can_train)
    return 0 if can_train else 1


def _print_table(findings: list[Finding], can_train: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": Text("ok", "green"), "lacks": Text("lacks", "yellow"), "fails": Text("FAILS", "bold red")}
    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.topic, finding.found, finding.remedy)
    console = open_console()
    console.print(table)
    console.print(
        "\nTraining can work here." if can_train else "\nTraining cannot work here until each FAILS is mended."
    )


def _start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finish(child: subprocess.Popen[str]) -> tuple[str, str | None]:
    """The child's output, and the last line of its error where it failed."""
    try:
        output, errors = child.communicate(timeout=_IMPORT_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return "", f"no answer within {_IMPORT_TIMEOUT_SECONDS} s"
    if child.returncode:
        return output, (errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
    return output, None


def _python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return Finding("python", found)
    return Finding("python", found, "fails", "use Python 3.11 or 3.12")


def _torch(child: subprocess.Popen[str]) -> Iterator[Finding]:
    output, fault = _finish(child)
    if fault is not None:
        yield Finding("torch", fault, "fails", "pip install torch")
        return
    torch: dict[str, Any] = json.loads(output.splitlines()[-1])
    yield Finding("torch", f"{torch['version']}, {'CUDA ' + torch['cuda'] if torch['cuda'] else 'CPU build'}")
    backends = [name for name in ("gloo", "nccl") if torch[name]]
    if not backends:
        yield Finding("process groups", "none", "fails", "install a torch built with torch.distributed")
    elif torch["devices"] and not torch["nccl"]:
        yield Finding("process groups", "gloo", "fails", "install a torch built with NCCL")
    else:
        yield Finding("process groups", " and ".join(backends))
    if not torch["devices"]:
        remedy = "small models train on the CPU; a GPU needs a CUDA build of torch and a driver"
        yield Finding("gpu", "none that torch can use", "lacks", remedy)
    for device in torch["devices"]:
        found = (
            f"{device['name']}, {device['gib']:.0f} GiB, compute capability {'.'.join(map(str, device['capability']))}"
        )
        old = device["capability"] < [8, 0]
        yield Finding("gpu", found, "lacks" if old else "ok", "no bf16 units: train.precision=fp16" if old else "")


def _variables() -> Iterator[Finding]:
    if found := os.environ.get(CUBLAS):
        remedy = f"unset {CUBLAS}: torch parses it anew in each matrix product; train.deterministic sets it itself"
        yield Finding(CUBLAS, found, "lacks", remedy)


def _library(name: str, child: subprocess.Popen[str]) -> Finding:
    _, fault = _finish(child)
    if fault is None:
        return Finding(name, _version_of(name))
    return Finding(name, fault, "fails", f"pip install {name}")


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "version unknown"


def _wandb_mode(child: subprocess.Popen[str]) -> Finding:
    output, fault = _finish(child)
    mode = "offline" if fault is not None else output.split()[-1]
    if mode == "online":
        return Finding("W&B key", "found: runs are logged online")
    remedy = "wandb login, or set WANDB_API_KEY" if mode == "offline" else ""
    return Finding("W&B key", f"metrics.wandb.mode=auto means {mode} here", "lacks", remedy)


def _slurm() -> Finding:
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if not missing:
        return Finding("slurm", "sbatch and srun")
    return Finding(
        "slurm", f"no {' and no '.join(missing)}", "lacks", "jobs are submitted from a machine that has Slurm"
    )


def _processor() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", f"{cores} this process may use")
    flags = set(_proc_field("/proc/cpuinfo", "flags").split())
    units = [label for flag, label in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX-512")) if flag in flags]
    if units:
        yield Finding("cpu bf16", f"units: {' and '.join(units)}")
    else:
        yield Finding("cpu bf16", "no units", "lacks", "on the CPU, train.precision=fp32 is faster")
    compiler = compiler_here()
    words = words_of(compiler or "")
    if compiler is not None and words and shutil.which(words[0]):
        yield Finding("C++ compiler", compiler)
    else:
        found = "none" if compiler is None else f"CXX={compiler} is not there"
        yield Finding("C++ compiler", found, "lacks", "on the CPU, steps take longer; install g++, or set CXX")


def _proc_field(path: str, name: str) -> str:
    """The value after ``name`` in a file of `name: value` lines, or an empty text."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def _memory() -> Finding:
    total, free = (int((_proc_field("/proc/meminfo", name) or "0").split()[0]) / 2**20 for name in _MEMORY_FIELDS)
    if not total:
        return Finding("memory", "unknown")
    found = f"{free:.1f} of {total:.1f} GiB free"
    if free < 2:
        return Finding("memory", found, "lacks", "configs/quickstart.yaml needs about 2 GiB for each process")
    return Finding("memory", found)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.exists():
        return Finding("/dev/shm", "none", "lacks", "NCCL needs it between GPUs of one node; mount a tmpfs there")
    gib = shutil.disk_usage(path).total / GIB
    if gib < 1:
        return Finding(
            "/dev/shm", f"{gib:.2f} GiB", "lacks", "in a container: --shm-size=8g; else set NCCL_SHM_DISABLE=1"
        )
    return Finding("/dev/shm", f"{gib:.1f} GiB")


def _disk() -> Finding:
    gib = shutil.disk_usage(Path.cwd()).free / GIB
    if not os.access(Path.cwd(), os.W_OK):
        return Finding("disk", "the current folder cannot be written", "fails", "run from a folder of your own")
    if gib < 1:
        return Finding(
            "disk", f"{gib:.2f} GiB free here", "fails", "free some, or set run_dir and data.token_dir elsewhere"
        )
    return Finding("disk", f"{gib:.1f} GiB free here")
