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
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML config.", show_default=False)] = None,
    overrides: OverridesArgument = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="H200, or a YAML file (default: slurm.gpu, or H100).", show_default=False),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs (default: the job of the config).", show_default=False)
    ] = None,
    imbalance: Annotated[
        float, typer.Option("--imbalance", help="Rows that the busiest rank of ep receives, over the mean.")
    ] = 1.0,
    machine: Annotated[
        str | None,
        typer.Option("--as", metavar="cpu", help="For processes on this machine's processor.", show_default=False),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="With --as: processes (default: 1).", show_default=False)
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            "--rows", help="Instead of CONFIG: plan each row of a file of published measurements.", show_default=False
        ),
    ] = None,
    search: Annotated[bool, switch("--search", text="Rank the layouts that are legal and fit.")] = False,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="With --search: a new file for the first one's config.", show_default=False),
    ] = None,
    traces: Annotated[
        int | None,
        typer.Option(
            "--traces", min=0, help="With --search: trace so many of the best (default: 3).", show_default=False
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option("--timeline", metavar="FILE", help="Draw one step: .svg, .png or .pdf.", show_default=False),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price-per-gpu-hour", help="Say what the run costs, in any currency.", show_default=False),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate", metavar="RUN", help="Instead of CONFIG: correct plans by a run.", show_default=False
        ),
    ] = None,
    calibrations: Annotated[bool, switch("--calibrations", text="List what corrects plans.")] = False,
    forget: Annotated[
        str | None, typer.Option("--forget", metavar="NAME", help="Remove a calibration.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Say whether a run fits the GPUs' memory, and what it takes, before it is paid for; without a GPU."""
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
        return commands.search_config(
            config, overrides or (), gpu, gpus, write, shown, TRACES if traces is None else traces
        )
    if traces is not None:
        raise UserError([f"--traces={traces} are of what --search has found; add --search"])
    if write is not None:
        raise UserError([f"--write={write} writes what --search has found; add --search"])
    return commands.plan_config(config, overrides or (), gpu, gpus, imbalance, shown)
