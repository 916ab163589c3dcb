"""The commands on clusters: preflight measures nodes; submit, status, logs and cancel work with Slurm's jobs."""

from pathlib import Path
from typing import Annotated

import typer

from launcher.arguments import (
    CLUSTER,
    ConfigArgument,
    JsonOption,
    LocalRanksOption,
    OverridesArgument,
    RunArgument,
    switch,
)
from launcher.completion import offer_runs

of_cluster = typer.Typer()  # without a name, so that its commands are top-level ones


@of_cluster.command(rich_help_panel=CLUSTER)
def preflight(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    ranks: LocalRanksOption = None,
    bad_nodes: Annotated[
        str | None,
        typer.Option("--bad-nodes", help="Write the names of slow and broken nodes there.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Measure GPUs, links and the run directory's disk, and name slow and broken nodes; under srun, of all nodes."""
    from launcher.commands.preflight import preflight_config

    return preflight_config(config, overrides or (), ranks, bad_nodes, json_wanted=as_json)


@of_cluster.command(rich_help_panel=CLUSTER)
def submit(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    nodes: Annotated[int | None, typer.Option(help="Short for slurm.nodes=N.", show_default=False)] = None,
    cluster: Annotated[
        str, typer.Option(metavar="PROFILE", help="slurm/clusters/PROFILE.yaml, or a YAML file's path.")
    ] = "generic",
    sweep: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Submit several runs, of which FILE says what differs.", show_default=False),
    ] = None,
    chain: Annotated[int | None, typer.Option(help="Short for slurm.chain=N.", show_default=False)] = None,
    no_requeue: Annotated[bool, switch("--no-requeue", text="Short for slurm.requeue=false.")] = False,
    skip_hashes: Annotated[
        bool, switch("--skip-hashes", text="Do not read all token files to compare their hashes.")
    ] = False,
    skip_plan: Annotated[bool, switch("--skip-plan", text="Submit what will not fit by plan, too.")] = False,
    dry_run: Annotated[bool, switch("--dry-run", text="Print the job script, and submit nothing.")] = False,
) -> int:
    """Check a run and hand it to Slurm; it saves and goes on through time limits, preemption and lost nodes."""
    from launcher.slurm.submit import submit_run
    from launcher.slurm.submit_sweep import submit_sweep

    short = {"slurm.nodes": nodes, "slurm.chain": chain, "slurm.requeue": "false" if no_requeue else None}
    given = [f"{key}={value}" for key, value in short.items() if value is not None]
    given, how = [*(overrides or ()), *given], {"dry_run": dry_run, "hashes": not skip_hashes, "plan": not skip_plan}
    if sweep is not None:
        return submit_sweep(sweep, config, given, cluster, **how)
    return submit_run(config, given, cluster, **how)


@of_cluster.command(rich_help_panel=CLUSTER)
def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run directory or name.", show_default=False, autocompletion=offer_runs),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Say how far a run is and what its jobs do; without RUN, those of all runs in the queue."""
    from launcher.slurm.follow import print_status

    return print_status(run, as_json=as_json)


@of_cluster.command(rich_help_panel=CLUSTER)
def logs(
    run: RunArgument,
    rank: Annotated[int, typer.Option(min=0, help="Whose log.")] = 0,
    job: Annotated[bool, switch("--job", text="The job script's log instead of a rank's.")] = False,
    lines: Annotated[int, typer.Option(min=0, help="At most so many of its last lines.")] = 100,
    follow: Annotated[bool, switch("--follow", "-f", text="Go on until no job of the run lives.")] = False,
) -> int:
    """Print the end of a rank's log."""
    from launcher.slurm.follow import print_log

    return print_log(run, None if job else rank, lines, follow=follow)


@of_cluster.command(rich_help_panel=CLUSTER)
def cancel(
    run: RunArgument,
    save: Annotated[bool, switch("--save", text="The running job saves before it ends.")] = False,
) -> int:
    """End a run's jobs."""
    from launcher.slurm.follow import cancel_run

    return cancel_run(run, save=save)
