"""Builds the documentation site as `make docs` does, for tests."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md"))


def build(docs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site from the pages in ``docs`` into ``out`` with the command of `make docs`; returns its result."""
    strict = ["--fail-on-warning", "--keep-going", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *strict, "--builder", "html", str(docs), str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)
