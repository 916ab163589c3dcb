"""The `roundtable data` commands: the data of a step, the steps that saw a document, where two runs' data differ."""

from typing import Annotated

import typer

from launcher.arguments import JsonOption, OtherRunArgument, RunArgument

data_app = typer.Typer(
    help="Show which documents the steps of a run saw, or compare the data of two runs.\n\n"
    "Computed from the run's record and its token files, not from logs."
)


@data_app.command("show")
def show_data(
    run: RunArgument,
    step: Annotated[int, typer.Option(metavar="N", help="The step, counted from 1.", show_default=False)],
    as_json: JsonOption = False,
) -> int:
    """Print the documents, token ranges and sources of a step."""
    from launcher.commands.data_show import show_step

    return show_step(run, step, as_json=as_json)


@data_app.command("where")
def find_data(
    run: RunArgument,
    document: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="The document to find: SOURCE/FILE:NUMBER, as `data show` prints it.", show_default=False
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="PIECE", help="The piece of text to find, to the letter.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Print the steps that saw a document or a piece of text.

    Give one of --document and --text.
    """
    from launcher.commands.data_where import show_where

    return show_where(run, document, text, as_json=as_json)


@data_app.command("diff")
def compare_data(run: RunArgument, other: OtherRunArgument, as_json: JsonOption = False) -> int:
    """Print the first step at which the data of two runs differ, and how.

    Exit code 1: they differ.
    """
    from launcher.commands.data_diff import show_difference

    return show_difference((run, other), as_json=as_json)
