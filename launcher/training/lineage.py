"""Where a branched run came from: a file in its run directory."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.training.owner import read_run_id
from launcher.training.run_parts import CONFIG, LINEAGE, check_parts


@dataclass(frozen=True)
class Without:
    """The documents that a branched run never sees."""

    documents: int
    sha256: str  # of their list (data.without.hash_of_list)
    first_seen: int | None  # the first step before the branch that had seen one of them; None: none had
    known_from: int  # of steps before this one no record was left to look at


@dataclass(frozen=True)
class Lineage:
    """The run directory, as it was called then, the step of its checkpoint, and the name that the run had drawn."""

    run: str
    step: int
    without: Without | None = None
    run_id: str | None = None  # None: of a branch that was made before runs drew names

    def is_there(self) -> bool:
        """Whether the directory is still that run's. Raises UserError where its name is damaged."""
        return (Path(self.run) / CONFIG).is_file() and read_run_id(Path(self.run)) == self.run_id


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
    without = found.get("without")
    return Lineage(found["run"], found["step"], None if without is None else Without(**without), found.get("run_id"))


def lineage_line(lineage: Lineage) -> str:
    """Where the run was branched from, in words."""
    line = f"branched from {lineage.run} at step {lineage.step}"
    if lineage.without is None:
        return line
    n, first = lineage.without.documents, lineage.without.first_seen
    seen = (
        "none of which had been seen by then" if first is None else f"of which some had been seen from step {first} on"
    )
    return f"{line}, without {n} document{'s' * (n != 1)}, {seen}"
