"""What one part found, as one JSON file that is whole after each check: a part that is killed loses nothing."""

import json
import os
import platform
import site
import subprocess
import sysconfig
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMIT_FILE = ROOT / "build" / "gpu-wheels" / "COMMIT"  # as `make gpu-wheels` writes it, for a copy without git
LIBRARIES = ("torch", "deepspeed", "transformers", "triton", "numpy")
LONGEST_MESSAGE = 4000  # characters of a failure: the last ones


class Skipped(Exception):
    """Raised by a check that cannot be made here; the message is the reason."""


@dataclass
class Report:
    """One part's file. ``running`` is the check that has begun and not ended."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(cls, path: Path, part: int, title: str, *, dry: bool) -> "Report":
        """An empty report, written at once, so that an older one of the same name cannot be taken for it."""
        head = {"part": part, "title": title, "dry": dry, "date": now(), "commit": commit()}
        report = cls(path, {**head, "finished": False, "running": None, "checks": [], "figures": []})
        report.write()
        return report

    @classmethod
    def read(cls, path: Path) -> "Report":
        """The report as it was last written."""
        return cls(path, json.loads(path.read_text()))

    def write(self) -> None:
        """Replaces the file at once: whoever reads it sees the old one or the new one."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(new, self.path)

    def tell(self, **values: Any) -> None:
        """Adds to what is known of the machine."""
        self.content |= values
        self.write()

    def start(self, check: str) -> None:
        """The check begins."""
        self.tell(running={"check": check, "since": datetime.now(UTC).timestamp()})

    def end(self, check: str, status: str, message: str, seconds: float) -> None:
        """The check has ended: passed, failed, or skipped with a reason."""
        told = from_root(message)[-LONGEST_MESSAGE:]
        row = {"check": check, "status": status, "message": told, "seconds": round(seconds, 2)}
        self.content["checks"].append(row)
        self.tell(running=None)

    def figure(self, check: str, name: str, value: Any, unit: str) -> None:
        """Something measured."""
        self.content["figures"].append({"check": check, "name": name, "value": value, "unit": unit})
        self.write()

    @property
    def ended(self) -> set[str]:
        """The names of the checks that have ended."""
        return {row["check"] for row in self.content["checks"]}

    def count(self, status: str) -> int:
        """How many checks have ended so."""
        return sum(row["status"] == status for row in self.content["checks"])


def from_root(text: str) -> str:
    """The text, in which paths begin at the project's root or where packages are installed, not at the machine's."""
    packages = {sysconfig.get_path(name) for name in ("purelib", "platlib")} | set(site.getsitepackages())
    for folder in sorted({*packages, str(ROOT)}, key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return text


def now() -> str:
    """The date and time, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def commit() -> str:
    """The code's commit: as COMMIT in the environment says, git's, the one that came with the wheels, or not known."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        pass
    return COMMIT_FILE.read_text().strip() if COMMIT_FILE.exists() else "unknown"


def versions() -> dict[str, str]:
    """The versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
