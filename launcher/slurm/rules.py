"""What a `slurm:` section must keep to, whatever the cluster."""

import re
from collections.abc import Iterator

from launcher.config.words import show
from launcher.slurm.config import SlurmConfig

WORDS = ("partition", "account", "qos", "constraint", "exclude", "memory", "network_interface")
PATHS = ("python", "container", "scratch")


def check_slurm(slurm: SlurmConfig) -> Iterator[str]:
    """One line for each rule that is broken: key, value, rule, remedy."""
    for name in WORDS:
        value = getattr(slurm, name)
        if value is not None and not re.fullmatch(r"[\w.,:;&|=@^*+/()\[\]-]+", value):
            yield f"slurm.{name}={show(value)} must be one word, as Slurm knows it; try null, or look it up with sinfo"
    for name in PATHS:
        value = getattr(slurm, name)
        if value is not None and (not value.strip() or not value.isprintable()):
            yield f"slurm.{name}={show(value)} must be a path or a name; try null"
    for number, value in enumerate(slurm.modules):
        if not re.fullmatch(r"[\w.+/:-]+", value):
            yield f"slurm.modules[{number}]={show(value)} must be a module's name; try one that `module avail` lists"
    for number, value in enumerate(slurm.environment):
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", value) or not value.isprintable():
            yield f"slurm.environment[{number}]={show(value)} must be NAME=value; try NCCL_DEBUG=INFO"
    if slurm.spare_nodes and not slurm.preflight:
        yield (
            f"slurm.spare_nodes={slurm.spare_nodes} needs slurm.preflight=true, which says whose place they take; try "
            "slurm.spare_nodes=0"
        )
    if slurm.notice_seconds >= 60 * slurm.time_minutes >= 60:
        yield (
            f"slurm.time_minutes={slurm.time_minutes} must be longer than slurm.notice_seconds={slurm.notice_seconds}, "
            f"the time to save at its end; try {slurm.notice_seconds // 60 + 60}"
        )
