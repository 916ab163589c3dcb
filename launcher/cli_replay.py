"""The commands on recorded steps: replay and blame execute one again, branch continues from a checkpoint."""

from typing import Annotated

import typer

from launcher.arguments import (
    ANALYSIS,
    TRAINING,
    BeginOption,
    JsonOption,
    LayoutArgument,
    OverridesArgument,
    RanksOfRunOption,
    RunArgument,
    StepOption,
    switch,
)

of_replay = typer.Typer()  # without a name, so that its commands are top-level ones


@of_replay.command("replay", rich_help_panel=ANALYSIS)
def replay(
    run: RunArgument,
    step: StepOption,
    overrides: LayoutArgument = None,
    ranks: RanksOfRunOption = None,
    begin: BeginOption = None,
    text: Annotated[bool, switch("--text", text="Print its documents, coloured by each token's loss.")] = False,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write those as a page.", show_default=False)
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the whole report.", show_default=False)
    ] = None,
) -> int:
    """Execute a recorded step again, on any layout, and show it: documents, tokens, gradients, updates, routers."""
    from launcher.commands.replay import Wishes, replay_step

    wishes = Wishes(ranks=ranks, begin=begin, json_file=json_file, html_file=html, shows_text=text)
    return replay_step(run, step, overrides or (), wishes)


@of_replay.command("blame", rich_help_panel=ANALYSIS)
def blame(
    run: RunArgument,
    step: StepOption,
    overrides: LayoutArgument = None,
    ranks: RanksOfRunOption = None,
    begin: BeginOption = None,
    leave_out: Annotated[
        str | None,
        typer.Option(
            "--leave-out",
            metavar="FILE",
            help="Write a list of the first documents, as `branch --without` takes it.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many documents that list has.")] = 1,
    as_json: JsonOption = False,
) -> int:
    """Say which documents of a step's batch, and which tokens, made its loss and its gradient."""
    from launcher.commands.blame import Wishes, blame_step

    wishes = Wishes(ranks=ranks, begin=begin, leave_out=leave_out, top=top, as_json=as_json)
    return blame_step(run, step, overrides or (), wishes)


@of_replay.command("branch", rich_help_panel=TRAINING)
def branch(
    run: RunArgument,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The run directory to make.", show_default=False)],
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, help="The checkpoint's step.", show_default=False)],
    overrides: OverridesArgument = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="FILE|DOCUMENT",
            help="Documents that it never sees: a file that lists them, or one's name. May be given several times.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Make a run directory that goes on from another run's checkpoint, with its optimizer states.

    With --without it is the last checkpoint up to --step from before any of the documents was seen.
    """
    from launcher.commands.branch import branch_run

    return branch_run(run, new, step, overrides or (), without or ())
