"""Writes what --out asks for: the page alone, or a folder of the page and its pictures, whole or not at all."""

import os
import shutil
from pathlib import Path
from typing import Any

from data.errors import reason_of
from launcher.errors import UserError
from launcher.inspection.asked import PAGE_ENDINGS
from launcher.inspection.page import render
from launcher.inspection.pictures import draw_all
from launcher.report.at_end import write_page
from launcher.report.page import made_at
from parallel.processes.stop import undoing

PAGE = "inspect.html"


def write_out(target: Path, report: dict[str, Any]) -> list[Path]:
    """Writes ``target`` and returns the files, the page first. Raises UserError where it cannot, leaving nothing."""
    page = render(report, made_at())
    try:
        with undoing():
            return _write(target, page, report)
    except OSError as error:
        raise UserError([f"--out={target} cannot be written ({reason_of(error)}); choose another place"]) from None


def _write(target: Path, page: str, report: dict[str, Any]) -> list[Path]:
    if target.suffix.lower() in PAGE_ENDINGS:
        write_page(target, page)
        return [target]
    return _write_folder(target, page, report)


def _write_folder(target: Path, page: str, report: dict[str, Any]) -> list[Path]:
    """Writes the folder under another name first, so that it never exists half written under its own."""
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
        (partial / PAGE).write_text(page, encoding="utf-8")
        names = [PAGE, *draw_all(report, partial)]
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return [target / name for name in names]
