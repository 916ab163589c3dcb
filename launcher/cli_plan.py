"""The `roundtable plan` command, which `launcher.cli` adds to its top-level ones."""

from pathlib import Path
from typing import Annotated

import typer

from launcher.arguments import PLANNING, JsonOption, OverridesArgument, switch
from launcher.errors import UserError

of_plan = typer.Typer()

TRACES = 3  # how many of a search's best layouts are traced without --traces


@of_plan.command(rich_help_panel=PLANNING)
def plan(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="A YAML config. Keys that it leaves out have their defaults.",
            show_default=False,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="GPU",
            help="The GPU: a name such as H200, or a YAML file that describes it (default: slurm.gpu, or H100).",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            min=1,
            help="Number of GPUs (default: those of the config's Slurm job, or the fewest that its layout takes).",
            show_default=False,
        ),
    ] = None,
    imbalance: Annotated[
        float,
        typer.Option(
            "--imbalance",
            metavar="RATIO",
            help="Load of the busiest rank of ep over the mean; 1 is balanced. Not with --search.",
        ),
    ] = 1.0,
    machine: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="cpu",
            help="Plan a step of processes on this machine's processor instead.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            min=1,
            help="With --as: number of processes (default: one for each GPU, or 1).",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            "--rows",
            metavar="FILE",
            help="Instead of CONFIG: plan each row of a file of published measurements.",
            show_default=False,
        ),
    ] = None,
    search: Annotated[
        bool, switch("--search", text="Rank the layouts that are legal and fit, the fastest first.")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="With --search: write the config of the first layout to this new file.",
            show_default=False,
        ),
    ] = None,
    traces: Annotated[
        int | None,
        typer.Option(
            "--traces",
            metavar="N",
            min=0,
            help="With --search: order the best N anew by traces, which are more exact (default: 3).",
            show_default=False,
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Also draw the time of one step into this picture: .svg, .png or .pdf.",
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price-per-gpu-hour",
            metavar="PRICE",
            help="Also print what the run costs at this price of one GPU for an hour, in any currency.",
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            metavar="RUN",
            help="Instead of CONFIG: correct later plans by what this run measured.",
            show_default=False,
        ),
    ] = None,
    calibrations: Annotated[
        bool, switch("--calibrations", text="Instead of CONFIG: list the calibrations that correct plans.")
    ] = False,
    forget: Annotated[
        str | None,
        typer.Option(
            "--forget", metavar="NAME", help="Instead of CONFIG: remove this calibration.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Estimate, without a GPU, whether a run fits the memory and how long it takes."""
    from launcher.commands import plan as commands

    instead = {"--rows": rows, "--calibrate": calibrate, "--calibrations": calibrations or None, "--forget": forget}
    given = [name for name, value in instead.items() if value is not None]
    if len(given) > 1 or (given and config is not None):
        names = " and ".join([*given, *([str(config)] if config else [])])
        raise UserError([f"{names} do not go together; give one of them"])
    if calibrate is not None:
        return commands.calibrate_by(calibrate, gpu, as_json=as_json)
    if calibrations:
        return commands.list_calibrations(as_json=as_json)
    if forget is not None:
        return commands.forget_calibration(forget)
    if rows is not None:
        return commands.plan_file(rows, as_json=as_json)
    if config is None:
        raise UserError(["Missing argument 'CONFIG'; give a config, or --rows FILE"])
    if machine is not None:
        from launcher.commands.plan_here import plan_processor

        others = {"--gpu": gpu, "--gpus": gpus, "--search": search or None, "--write": write, "--timeline": timeline}
        others |= {
            "--price-per-gpu-hour": price,
            "--traces": traces,
            "--imbalance": None if imbalance == 1 else imbalance,
        }
        given = [name for name, value in others.items() if value is not None]
        return plan_processor(config, overrides or (), machine, ranks, given, as_json=as_json)
    if ranks is not None:
        raise UserError([f"--ranks={ranks} is a number of this machine's processes; add --as cpu, or give --gpus"])
    shown = commands.Shown(as_json, price, timeline)
    if search:
        if timeline is not None:
            raise UserError([f"--timeline={timeline} draws the step of one layout; leave out --search"])
        if imbalance != 1:
            rule = "does not go with --search, which plans equal loads of all experts; leave out one of the two"
            raise UserError([f"--imbalance={imbalance:g} {rule}"])
        return commands.search_config(
            config, overrides or (), gpu, gpus, write, shown, TRACES if traces is None else traces
        )
    if traces is not None:
        raise UserError([f"--traces={traces} are of what --search has found; add --search"])
    if write is not None:
        raise UserError([f"--write={write} writes what --search has found; add --search"])
    return commands.plan_config(config, overrides or (), gpu, gpus, imbalance, shown)
