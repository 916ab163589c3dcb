"""The record of a branched run's parent, kept in a file of its run directory."""

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
    first_seen: int | None  # the first step before the branch that had consumed one of them; None: none had
    known_from: int  # the first step of which a record was left to look at


@dataclass(frozen=True)
class Lineage:
    """A branched run's parent: its run directory at that time, the step of its checkpoint, and its run id."""

    run: str
    step: int
    without: Without | None = None
    run_id: str | None = None  # None: the branch was made before runs had ids

    def is_there(self) -> bool:
        """Whether the directory still holds that run. Raises UserError where its file with the id is damaged."""
        return (Path(self.run) / CONFIG).is_file() and read_run_id(Path(self.run)) == self.run_id


def write_lineage(run_path: Path, lineage: Lineage) -> None:
    """Writes the lineage into the run directory."""
    (run_path / LINEAGE).write_text(json.dumps(asdict(lineage)) + "\n")


def read_lineage(run_path: Path) -> Lineage | None:
    """The recorded lineage; None for a run that was not branched. Raises UserError where the file is damaged."""
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
