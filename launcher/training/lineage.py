"""Where a branched run came from: a file in its run directory."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.training.run_parts import LINEAGE, check_parts


@dataclass(frozen=True)
class Lineage:
    """The run directory, as it was called then, and the step of its checkpoint."""

    run: str
    step: int


def write_lineage(run_path: Path, lineage: Lineage) -> None:
    """Records it."""
    (run_path / LINEAGE).write_text(json.dumps(asdict(lineage)) + "\n")


def read_lineage(run_path: Path) -> Lineage | None:
    """What is recorded; None for a run that began by itself. Raises UserError where the file is damaged."""
    check_parts(run_path, LINEAGE)
    path = run_path / LINEAGE
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return Lineage(found["run"], found["step"])
