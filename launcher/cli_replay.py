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
    text: Annotated[
        bool, switch("--text", text="Also print the step's documents, each token coloured by its loss.")
    ] = False,
    html: Annotated[
        str | None,
        typer.Option(
            "--html", metavar="FILE", help="Write the coloured documents as an HTML page.", show_default=False
        ),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the whole report to this file as JSON.", show_default=False),
    ] = None,
) -> int:
    """Execute a recorded step again, on any layout, and compare it with its record.

    Also shows the step's documents, tokens, gradients, updates and routers. RUN is only read.
    Exit code 1: the record is not reproduced.
    """
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
            help="Write the documents with the most blame to this file, a list for `branch --without`.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=1, help="With --leave-out: number of documents in the list.")
    ] = 1,
    as_json: JsonOption = False,
) -> int:
    """Rank the documents and tokens that caused a step's loss and gradient norm.

    Executes the step again, on any layout. RUN is only read. Exit code 1: the record is not reproduced.
    """
    from launcher.commands.blame import Wishes, blame_step

    wishes = Wishes(ranks=ranks, begin=begin, leave_out=leave_out, top=top, as_json=as_json)
    return blame_step(run, step, overrides or (), wishes)


@of_replay.command("branch", rich_help_panel=TRAINING)
def branch(
    run: RunArgument,
    new: Annotated[
        str, typer.Argument(metavar="NEW", help="The run directory to make; must not exist.", show_default=False)
    ],
    step: Annotated[
        int,
        typer.Option(
            "--step",
            metavar="N",
            min=0,
            help="The step of the checkpoint to continue from; with --without: the last step to consider.",
            show_default=False,
        ),
    ],
    overrides: OverridesArgument = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="FILE|DOCUMENT",
            help="Documents that it never sees: a file that lists them, or one's name; may be given several times.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Make a new run that continues from a checkpoint of another, optimizer included.

    `roundtable train NEW/config.yaml` then trains it. RUN is only read.

    With --without, the checkpoint is the last one up to --step from before any of the documents was seen.
    """
    from launcher.commands.branch import branch_run

    return branch_run(run, new, step, overrides or (), without or ())
