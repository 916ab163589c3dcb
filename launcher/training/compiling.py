"""Whether chains of elementwise operations are compiled: by train.compile, and by the compilers of this machine."""

import os
import shutil
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from launcher.errors import UserError
from modeling.kernels.by_rows import PIECE_BYTES, ByRows
from modeling.kernels.fuse import Fuse, compiled, known_chains, plainly
from parallel.mesh import Mesh

Compile = Literal["auto", "on", "off"]


def fuse_of(choice: Compile, device_type: str, piece_bytes: int = PIECE_BYTES) -> Fuse:
    """How chains are computed for this train.compile on a device that has a compiler: "auto" compiles on GPUs only.

    On a CPU, chains that are not compiled are computed in pieces of rows, of ``piece_bytes`` each.
    """
    if choice == "on" or (choice == "auto" and device_type == "cuda"):
        return compiled
    return ByRows(piece_bytes) if device_type == "cpu" else plainly


def usable_fuse(
    choice: Compile,
    device: torch.device,
    tell: Callable[[str], None],
    piece_bytes: int = PIECE_BYTES,
    share: Callable[[str | None], str | None] = lambda problem: problem,
) -> Fuse:
    """How chains are computed on this machine, after a small chain was compiled to see whether compiling works.

    Where it does not work, "auto" compiles nothing, after ``tell`` was given a line that says why, and "on" raises
    UserError. ``share`` turns this rank's problem into that of the first rank that has one, so that either all ranks
    compile or none: otherwise the others would wait for the slow rank in each step, without a message.
    """
    fuse = fuse_of(choice, device.type, piece_bytes)
    problem = why_not(device) if fuse is compiled else None
    if choice == "on" and problem is not None:
        raise UserError([f"train.compile=on needs a compiler that works: {problem}; {REMEDIES[device.type]}"])
    problem = share(problem) if fuse is compiled and choice == "auto" else None
    if problem is None:
        return fuse
    told = "train.compile=auto: elementwise kernels are not compiled, so steps take longer"
    tell(f"{told}: {problem}; {REMEDIES[device.type]}")
    return fuse_of("off", device.type, piece_bytes)


def first_problem(mesh: Mesh, problem: str | None) -> str | None:
    """The problem of the first rank that has one, with the rank's place on the axes; None where none has.

    All ranks call it. With a single rank the problem comes back as it is.
    """
    if mesh.control is None or mesh.world_size == 1:
        return problem
    found: list[str | None] = [None] * mesh.world_size
    dist.all_gather_object(found, problem and f"{mesh.place}: {problem}", group=mesh.control)
    return next((each for each in found if each is not None), None)


REMEDIES = {
    "cpu": "install g++ and Python's headers, or set train.compile=off",
    "cuda": "install Triton, a C compiler and Python's headers, or set train.compile=off",
}


def check_compiler(choice: Compile) -> None:
    """Raises UserError for train.compile=on on a machine without a compiler. It runs before anything is created."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    problem = missing_compiler(device_type) if choice == "on" else None
    if problem is not None:
        raise UserError([f"train.compile=on needs a compiler that works: {problem}; {REMEDIES[device_type]}"])


def missing_compiler(device_type: str) -> str | None:
    """A phrase naming the compilers that torch would use for the device type; None where one of them is installed."""
    if device_type == "cuda":
        names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    else:
        names = [os.environ.get("CXX") or "g++"]
    if any(shutil.which(name) for name in names):
        return None
    return f"there is no {' or '.join(names)}"


def why_not(device: torch.device) -> str | None:
    """Why nothing can be compiled for the device, in one line; None where compiling works.

    It compiles a chain of one addition, which torch's cache keeps for later starts.
    """
    problem = missing_compiler(device.type)
    if problem is not None:
        return problem
    try:
        compiled(add_one, torch.zeros(8, 8, device=device))
    except Exception as error:  # compilers and torch's own passes fail in many ways; all mean: run without
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
    return None


def add_one(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers plus 1: the chain that ``why_not`` compiles to test the compiler."""
    return numbers + 1


def compiled_so_far() -> tuple[int, float]:
    """(number of chains that this process has compiled, seconds that their first calls took)."""
    chains = [chain for chain in known_chains() if chain.compiled is not None]
    return len(chains), sum(chain.first_call_seconds for chain in chains)
