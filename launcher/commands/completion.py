"""`roundtable completion SHELL`: the script by which a shell asks `launcher.completion` for completions."""

import difflib

# what `--show-completion` prints; typer's public interface does not return it as text
from typer.completion import get_completion_script  # pyright: ignore[reportPrivateImportUsage]

from launcher.completion import SHELLS
from launcher.config.words import show
from launcher.console import say
from launcher.errors import UserError


def print_script(shell: str) -> None:
    """Prints the script for ``shell``, to be sourced or kept in a file. Raises UserError for an unknown one."""
    if shell not in SHELLS:
        near = difflib.get_close_matches(shell, SHELLS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"try {SHELLS[0]}"
        raise UserError([f"SHELL={show(shell)} must be one of {', '.join(SHELLS)}; {remedy}"])
    say(get_completion_script(prog_name="roundtable", complete_var="_ROUNDTABLE_COMPLETE", shell=shell))
