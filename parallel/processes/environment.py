"""Reads and checks the variables that torchrun and Slurm set, so that a wrong one gives a message, not a long wait."""

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence

TOKEN = "ROUNDTABLE_TOKEN"  # the variable with a secret that only a job's own processes know
MOST_RANKS = 10**6
LARGEST = 2**32 - 1  # the largest number that Slurm and torchrun use: they have 32 bits

# Further variables that must be numbers wherever they are set: the least and the largest allowed.
COUNTS = {
    "LOCAL_WORLD_SIZE": (1, MOST_RANKS),
    "TORCHELASTIC_RESTART_COUNT": (0, LARGEST),
    "TORCHELASTIC_MAX_RESTARTS": (0, LARGEST),
    "SLURM_JOB_ID": (1, LARGEST),
    "SLURM_STEP_ID": (0, LARGEST),
    "SLURM_RESTART_COUNT": (0, LARGEST),
}


class WrongEnvironment(Exception):
    """Environment variables are missing or wrong. ``problems`` has a line for each: name, value, rule and remedy."""

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
    """The number that a variable holds, or ``default`` where it is not set.

    Raises WrongEnvironment where it is no whole number from ``least`` to ``most``, or is not set and has no default.
    ``why`` explains the limits in the message.
    """
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
    """The host name or IP address that a variable holds; it is not looked up.

    Raises WrongEnvironment where the variable is not set, or holds neither.
    """
    text = environment.get(name)
    if text is None:
        raise WrongEnvironment([f"{name} must be set; {remedy_for(name)}"])
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", text) and not _is_ip(text):
        raise WrongEnvironment([f"{name}={show(text)} must be one host name or IP address; {remedy_for(name)}"])
    return text


def check_counts(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A message for each variable of COUNTS that is set and wrong."""
    problems: list[str] = []
    for name, (least, most) in COUNTS.items():
        try:
            number(name, environment, least=least, most=most, default=least)
        except WrongEnvironment as error:
            problems += error.problems
    return problems


def remedy_for(name: str) -> str:
    """The remedy for a wrong variable, in words: which program sets it, and how to start."""
    if name.startswith("SLURM_"):
        return "Slurm sets it for each step and task: unset what your shell or script sets, and start by srun or sbatch"
    if name.startswith("TORCHELASTIC_"):
        return "torchrun sets it: start the ranks by torchrun, or unset it"
    return "start the ranks by torchrun or srun, which set it, or unset RANK and WORLD_SIZE for a run of this machine"


def show(text: str) -> str:
    """A value as it is shown in messages: quoted, on one line, and at most 80 characters of it."""
    return ascii(text if len(text) <= 80 else f"{text[:80]}…")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
