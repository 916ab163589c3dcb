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
        typer.Option(
            "--bad-nodes",
            metavar="FILE",
            help="Write the names of slow and broken nodes to this file, one a line.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Measure GPUs, links and the shared disk, and name slow and broken nodes.

    Under srun or torchrun: all nodes of the job; else this machine. Measurements are kept in RUN_DIR/preflight.
    Exit code 1: a node is bad, or there is no verdict.
    """
    from launcher.commands.preflight import preflight_config

    return preflight_config(config, overrides or (), ranks, bad_nodes, json_wanted=as_json)


@of_cluster.command(rich_help_panel=CLUSTER)
def submit(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Number of nodes: short for slurm.nodes=N.", show_default=False)
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="PROFILE", help="The cluster's profile: a name in slurm/clusters, or the path of a YAML file."
        ),
    ] = "generic",
    sweep: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Submit several runs as one job array; FILE states what differs.", show_default=False
        ),
    ] = None,
    chain: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Submit N jobs, each to begin when the one before ends: short for slurm.chain=N.",
            show_default=False,
        ),
    ] = None,
    no_requeue: Annotated[
        bool, switch("--no-requeue", text="Do not queue a stopped job again: short for slurm.requeue=false.")
    ] = False,
    skip_hashes: Annotated[
        bool, switch("--skip-hashes", text="Do not compare the hashes of the token files, which reads all of them.")
    ] = False,
    skip_plan: Annotated[
        bool, switch("--skip-plan", text="Submit the run even if the plan says that it does not fit the GPUs' memory.")
    ] = False,
    dry_run: Annotated[
        bool, switch("--dry-run", text="Print the job script and warnings, and submit nothing.")
    ] = False,
) -> int:
    """Check a run and submit it to Slurm; it resumes after time limits and failures.

    The job saves before a time limit or preemption ends it, is queued again, and resumes from its last checkpoint.
    """
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
        typer.Argument(
            metavar="RUN",
            help="A run directory, or the name of a run in the folder runs (default: all that have a job).",
            show_default=False,
            autocompletion=offer_runs,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Show the progress and the Slurm jobs of a run, or of all runs in the queue."""
    from launcher.slurm.follow import print_status

    return print_status(run, as_json=as_json)


@of_cluster.command(rich_help_panel=CLUSTER)
def logs(
    run: RunArgument,
    rank: Annotated[int, typer.Option(metavar="N", min=0, help="The rank whose log is printed.")] = 0,
    job: Annotated[bool, switch("--job", text="Print the job script's log instead of a rank's.")] = False,
    lines: Annotated[int, typer.Option(metavar="N", min=0, help="Print the last N lines.")] = 100,
    follow: Annotated[
        bool, switch("--follow", "-f", text="Print new lines as they come, until no job of the run is left.")
    ] = False,
) -> int:
    """Print the end of a rank's log, or of the job script's."""
    from launcher.slurm.follow import print_log

    return print_log(run, None if job else rank, lines, follow=follow)


@of_cluster.command(rich_help_panel=CLUSTER)
def cancel(
    run: RunArgument,
    save: Annotated[bool, switch("--save", text="Let the running job save a checkpoint before it ends.")] = False,
) -> int:
    """Cancel the Slurm jobs of a run."""
    from launcher.slurm.follow import cancel_run

    return cancel_run(run, save=save)
