"""Reads a cluster's profile (defaults of the `slurm:` section) and the templates of job scripts."""

import os
from importlib import resources
from pathlib import Path
from typing import Any

from launcher.config.yaml_text import read_yaml_file
from launcher.errors import UserError

FOLDER = Path(str(resources.files("launcher.slurm"))) / "files"  # in the source tree a link to slurm/


def read_profile(name: str) -> dict[str, Any]:
    """The keys of a profile: slurm/clusters/NAME.yaml, or the file itself where ``name`` is a path to a YAML file.

    Raises UserError where there is no such file.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / "clusters" / f"{name}.yaml"
    if not os.path.isfile(path):
        known = sorted(each.stem for each in (FOLDER / "clusters").glob("*.yaml"))
        raise UserError([f"--cluster={name} must be one of {', '.join(known)}, or the path of a YAML file; check it"])
    return read_yaml_file(path)


def job_script(name: str) -> str:
    """The text of slurm/NAME.sbatch. Raises UserError where it is missing."""
    path = FOLDER / f"{name}.sbatch"
    if not path.is_file():
        raise UserError([f"{path} is missing; install Roundtable again, or check out slurm/ and the link to it"])
    return path.read_text()
