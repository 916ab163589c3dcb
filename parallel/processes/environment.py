"""What the variables that torchrun and Slurm set must be, so that a wrong one is named instead of waited for."""

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence

TOKEN = "ROUNDTABLE_TOKEN"  # what only a job's own processes know
MOST_RANKS = 10**6
LARGEST = 2**32 - 1  # of what Slurm and torchrun count: they have 32 bits

# What else must be a number wherever it is set: the least and the most that it can be.
COUNTS = {
    "LOCAL_WORLD_SIZE": (1, MOST_RANKS),
    "TORCHELASTIC_RESTART_COUNT": (0, LARGEST),
    "TORCHELASTIC_MAX_RESTARTS": (0, LARGEST),
    "SLURM_JOB_ID": (1, LARGEST),
    "SLURM_STEP_ID": (0, LARGEST),
    "SLURM_RESTART_COUNT": (0, LARGEST),
}


class WrongEnvironment(Exception):
    """Variables are missing or wrong. ``problems`` holds a line each: the variable, its value, the rule, the remedy."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def number(
    name: str,
    environment: Mapping[str, str] = os.environ,
    *,
    least: int = 0,
    most: int = LARGEST,
    default: int | None = None,
    why: str = "",
) -> int:
    """The variable's number; ``default`` where it is not set. Raises WrongEnvironment; ``why`` explains the limits."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise WrongEnvironment([f"{name} must be set{why}; {remedy_for(name)}"])
    value = int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None
    if value is None or not least <= value <= most:
        rule = f"must be a whole number from {least} to {most}{why}"
        raise WrongEnvironment([f"{name}={show(text)} {rule}; {remedy_for(name)}"])
    return value


def address(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """The variable's host name or IP address, which nobody has looked up. Raises WrongEnvironment."""
    text = environment.get(name)
    if text is None:
        raise WrongEnvironment([f"{name} must be set; {remedy_for(name)}"])
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", text) and not _is_ip(text):
        raise WrongEnvironment([f"{name}={show(text)} must be one host name or IP address; {remedy_for(name)}"])
    return text


def check_counts(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A line for each of COUNTS that is set and wrong."""
    problems: list[str] = []
    for name, (least, most) in COUNTS.items():
        try:
            number(name, environment, least=least, most=most, default=least)
        except WrongEnvironment as error:
            problems += error.problems
    return problems


def remedy_for(name: str) -> str:
    """Where a variable's right value comes from."""
    if name.startswith("SLURM_"):
        return "Slurm sets it for each step and task: unset what your shell or script sets, and start by srun or sbatch"
    if name.startswith("TORCHELASTIC_"):
        return "torchrun sets it: start the ranks by torchrun, or unset it"
    return "start the ranks by torchrun or srun, which set it, or unset RANK and WORLD_SIZE for a run of this machine"


def show(text: str) -> str:
    """A value as it stands in a message: quoted, on one line, and not too long."""
    return ascii(text if len(text) <= 80 else f"{text[:80]}…")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
