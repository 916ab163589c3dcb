"""Checks the path of a picture that a command is to write, and saves the figure there."""

import io
import os
from pathlib import Path

from matplotlib.figure import Figure

from data.errors import reason_of
from data.places import why_not_writable
from launcher.errors import UserError
from launcher.new_file import new_file
from parallel.processes.stop import undoing

ENDINGS = (".png", ".svg", ".pdf")


def check_picture(target: Path, key: str, usual: str) -> None:
    """Raises UserError where a picture cannot be written to ``target``; called before anything slow is done.

    ``key`` is the option that the user set to the path, and ``usual`` an example value for the message.
    """
    if target.suffix.lower() not in ENDINGS:
        raise UserError([f"{key}={target} must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}; try {usual}"])
    rule = why_not_writable(target.parent)
    if rule is None and not target.parent.is_dir():
        rule = f"must lie in a folder that is there, and {target.parent} is not"
    if rule is None and target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
        rule = "must be a file that can be written to, and is not"
    if rule is not None:
        raise UserError([f"{key}={target} {rule}; choose another place"])


def save_picture(figure: Figure, target: Path, key: str) -> None:
    """Writes the figure to ``target`` at 150 dpi. Raises UserError where the file cannot be written.

    After a full disk, Ctrl-C or SIGTERM, ``target`` is the picture that was there before, or missing.
    """
    drawn = io.BytesIO()  # on a full disk matplotlib's writers of PDF raise errors of any kind
    figure.savefig(drawn, dpi=150, format=target.suffix[1:].lower())
    try:
        with undoing(), new_file(target) as partial:
            partial.write_bytes(drawn.getbuffer())
    except OSError as error:
        raise UserError([f"{key}={target} cannot be written ({reason_of(error)}); choose another place"]) from None
