"""The `roundtable` command line: each command parses arguments, loads and checks the config, and calls one function.

Exit codes: 0 success; 2 wrong user input (one line per problem on stderr, nothing created); 3 stopped by a rule of the
config's `health`; 75 stopped on request after saving a checkpoint; 130 interrupted; 1 any other failure. Commands
import the heavy libraries that they need, so that help and error messages come quickly and without their own output.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from data.errors import DataError
from launcher.arguments import (
    DATA,
    PLANNING,
    SETUP,
    TRAINING,
    ConfigArgument,
    GpuOption,
    JsonOption,
    LocalRanksOption,
    NewFolderOption,
    OverridesArgument,
    RanksOption,
    switch,
)
from launcher.cli_checkpoints import of_checkpoints
from launcher.cli_cluster import of_cluster
from launcher.cli_data import data_app
from launcher.cli_plan import of_plan
from launcher.cli_replay import of_replay
from launcher.completion import mend_bash_words, offer_runs, offer_shells
from launcher.config.secrets import mask
from launcher.console import Unheard, drop_output, end_output, refusal, say, show_exception, tell
from launcher.errors import WRONG_PATH, UserError, why_not_encoded, why_refused
from launcher.interrupts import INTERRUPTED, hold_interrupts_while_importing, leave_at_interrupt
from launcher.limits import check_current_folder, check_limits, keep_others_from_writing
from launcher.streams import open_closed_streams
from parallel.processes.environment import WrongEnvironment

app = typer.Typer(
    name="roundtable",
    help="Pretrains mixture-of-experts language models; every parallel layout trains the same model.\n\n"
    "`roundtable COMMAND --help` explains a command with its arguments and options.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(data_app, name="data", rich_help_panel=DATA)
app.add_typer(of_plan)
app.add_typer(of_cluster)
app.add_typer(of_checkpoints)
app.add_typer(of_replay)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        say(f"roundtable {version('roundtable')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before the command."""
    check_current_folder()
    if context.invoked_subcommand != "doctor":  # which itself reports limits that are too low
        check_limits()


@app.command(rich_help_panel=SETUP)
def doctor(as_json: JsonOption = False) -> int:
    """List what this machine has (GPUs, libraries, memory) and what will not work.

    Exit code 1: training cannot work here.
    """
    from launcher.commands.doctor import print_report

    return print_report(as_json=as_json)


@app.command("config", rich_help_panel=SETUP)
def print_config(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="A YAML config; with --keys: the beginning of the keys to list, such as optimizer."
        ),
    ] = None,
    overrides: OverridesArgument = None,
    ranks: RanksOption = None,
    keys: Annotated[
        bool, switch("--keys", text="List the config's keys with their defaults, possible values and meanings.")
    ] = False,
    schema: Annotated[
        bool, switch("--schema", text="Print a JSON schema, with which editors check and complete configs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved config and mark what differs from the defaults.

    With --keys or --schema: describe the keys that a config can have. CONFIG is not needed then.
    """
    if schema:
        from launcher.config.json_schema import print_schema

        print_schema([*([str(config)] if config else []), *(overrides or ()), *(["--keys"] if keys else [])])
        return
    if keys:
        from launcher.config.keys import print_keys

        print_keys(str(config or ""), overrides or (), as_json=as_json)
        return
    from launcher.config.checked import fewest_ranks, load_checked
    from launcher.config.dump import config_to_json, describe_config

    if config is None:
        raise UserError(["Missing argument 'CONFIG'; see roundtable config --help"])
    ranks = ranks or fewest_ranks(config, overrides or ())
    resolved = load_checked(config, overrides or (), world_size=ranks, data=False)
    say(config_to_json(resolved) if as_json else describe_config(resolved), end="")


@app.command(rich_help_panel=SETUP)
def completion(
    shell: Annotated[
        str,
        typer.Argument(
            metavar="SHELL", help="Your shell: bash, zsh or fish.", show_default=False, autocompletion=offer_shells
        ),
    ],
) -> None:
    """Print a script that makes <TAB> complete commands, config keys and runs.

    In bash: source <(roundtable completion bash)
    In zsh, after compinit: source <(roundtable completion zsh)
    In fish: roundtable completion fish > ~/.config/fish/completions/roundtable.fish
    """
    from launcher.commands.completion import print_script

    print_script(shell)


@app.command(rich_help_panel=DATA)
def prepare(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    report: Annotated[
        bool, switch("--report", text="Also write an HTML page about the data into data.token_dir.")
    ] = False,
) -> None:
    """Tokenize raw text into token files; can be stopped and started again.

    The files go to data.token_dir. In a Slurm job array, each task prepares its share.
    """
    from launcher.commands.prepare import prepare_shown
    from launcher.config.checked import fewest_ranks, load_checked
    from launcher.training.run_dir import enter_start_folder
    from parallel.processes.stop import ending
    from parallel.processes.world import array_task

    config = enter_start_folder(config, overrides or ())
    loaded = load_checked(config, overrides or (), world_size=fewest_ranks(config, overrides or ()))
    with ending([signal.SIGTERM], code=None):  # workers end with it, and remove what is half written
        prepare_shown(loaded, array_task(), report=report)


@app.command(rich_help_panel=TRAINING)
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    ranks: LocalRanksOption = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            metavar="N",
            min=0,
            help="After a crash, start all local processes again from the last good checkpoint, at most N times.",
        ),
    ] = 0,
    dry_run: Annotated[
        bool, switch("--dry-run", text="Make every check, print what the run would take, and change nothing.")
    ] = False,
    as_json: Annotated[bool, switch("--json", text="With --dry-run: print JSON instead of text.")] = False,
) -> int:
    """Train, or resume from the last good checkpoint in the run directory.

    Starts local processes, and first prepares token files that are missing.
    Under srun or torchrun it joins the job, for which the token files must be there.

    Exit codes: 0 trained; 2 wrong input; 3 stopped by a rule of the config's section health;
    75 stopped on request after saving a checkpoint; 130 interrupted; 1 any other failure.
    """
    if dry_run:
        from launcher.plan.dry_run import dry_run as try_start

        return try_start(config, overrides or (), ranks, as_json=as_json)
    if as_json:
        raise UserError(["--json works with --dry-run only; a run's numbers are in its metrics.jsonl"])
    from launcher.training.start import start_training

    return start_training(config, overrides or (), ranks, max_restarts)


@app.command(rich_help_panel=TRAINING)
def runs(
    directories: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR", help="Folders of runs, or run directories (default: the folder runs).", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
    clean: Annotated[
        bool,
        switch(
            "--clean",
            text="Remove token files, tokenizers and partial folders that none of these runs needs; asks first.",
        ),
    ] = False,
    yes: Annotated[bool, switch("--yes", text="With --clean: remove without asking.")] = False,
) -> int:
    """List runs with their state, step, losses and size; the last changed comes first."""
    if clean:
        from launcher.commands.clean import clean as remove_unneeded

        if as_json:
            raise UserError(["--json does not work with --clean; leave one of them out"])
        return remove_unneeded(directories or [], yes=yes)
    if yes:
        raise UserError(["--yes works with --clean only; leave it out"])
    from launcher.commands.runs import print_runs

    return print_runs(directories or [], as_json=as_json)


@app.command(rich_help_panel=TRAINING)
def plot(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Run directories, or names of runs in the folder runs.",
            show_default=False,
            autocompletion=offer_runs,
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The picture to write: .png, .svg or .pdf (default: RUN/plot.png; of several runs, plot.png here).",
            show_default=False,
        ),
    ] = None,
    x: Annotated[str, typer.Option("--x", metavar="AXIS", help="The horizontal axis: steps or tokens.")] = "steps",
) -> int:
    """Draw one picture that compares runs: losses, gradient norm, speed and more."""
    from launcher.commands.plot import plot_runs

    return plot_runs(names, out, x)


@app.command(rich_help_panel=TRAINING)
def report(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Run directories, or names of runs in the folder runs.",
            show_default=False,
            autocompletion=offer_runs,
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The page to write: .html (default: RUN/report.html; of several runs, report.html here).",
            show_default=False,
        ),
    ] = None,
    plan_gpu: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="GPU",
            help="Also show what `plan` predicts for this GPU beside each run: a name such as H100, or a YAML file.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Write one HTML page, readable without a network, about one run or several."""
    from launcher.commands.report import report_runs

    return report_runs(names, out, plan_gpu)


@app.command(rich_help_panel=PLANNING)
def prove(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            min=1,
            help="Number of local processes (default: the layout with dp 2, its degrees lowered to fit 8 processes).",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, max=32, help="Number of updates to compare.")
    ] = 3,
    keep: Annotated[
        bool, switch("--keep", text="Keep the proof's folder of token files and checkpoints, and print its path.")
    ] = False,
    matrix: Annotated[
        bool, switch("--matrix", text="Prove a whole table of layouts instead of the config's own; may take an hour.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Show that the layout trains a small copy of the model as one plain process does.

    Runs on local CPU processes, and compares losses, gradients, weights, routing, samples and checkpoints.
    Exit code 1: something differs.
    """
    if matrix:
        from launcher.prove.matrix import prove_matrix

        if ranks is not None or keep:
            raise UserError(["--matrix sets the processes itself and keeps nothing; leave out --ranks and --keep"])
        return prove_matrix(config, overrides or (), steps, as_json)
    from launcher.commands.prove import prove_config

    return prove_config(config, overrides or (), ranks, steps, keep, as_json)


@app.command(rich_help_panel=PLANNING)
def coords(
    config: ConfigArgument,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The picture to write: .png, .svg or .pdf.", show_default=False)
    ],
    overrides: OverridesArgument = None,
    widths: Annotated[
        str | None,
        typer.Option(
            metavar="D,D,...",
            help="Values of model.d_model (default: 4, 8, 16 and 32 times that of the model as `prove` shrinks it).",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, max=1000, help="Number of updates at each width.")
    ] = 4,
    as_json: JsonOption = False,
) -> int:
    """Run muP's coordinate check: plot the sizes of activations against the width.

    Trains small models of several widths, with muP and without. Flat lines mean that muP is right.
    Exit code 1: a line is not flat under muP.
    """
    from launcher.commands.coords import check_coordinates

    return check_coordinates(config, out, overrides or (), widths, steps, as_json)


@app.command(rich_help_panel=PLANNING)
def profile(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    gpu: GpuOption = None,
    ranks: LocalRanksOption = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Number of steps to measure.")] = 3,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", help="Number of steps to run before those.")] = 2,
    out: NewFolderOption = None,
    as_json: JsonOption = False,
) -> int:
    """Measure where the time of a training step goes, part by part.

    Compares each part with this machine's roofline, and writes a trace for Perfetto and a picture of memory.
    With --as: estimate the same for a GPU, without having one.
    """
    from launcher.commands.profile import Wishes, profile_config

    wishes = Wishes(out=out, ranks=ranks, steps=steps, warmup=warmup, as_json=as_json)
    return profile_config(config, overrides or (), gpu, wishes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; ``arguments`` default to ``sys.argv[1:]``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    open_closed_streams()
    keep_others_from_writing()
    mend_bash_words()
    os.environ["MPLBACKEND"] = "agg"  # child processes of Jupyter inherit its own, which may not be installed here
    if arguments is None:
        sys.excepthook = show_exception
        hold_interrupts_while_importing()
    code = _run(given)
    if arguments is None and code == INTERRUPTED:
        leave_at_interrupt()
    return code


def _run(given: list[str]) -> int:
    """Runs one command and returns its exit code; errors of known kinds are printed to stderr and become exit codes."""
    try:
        code = app(args=given or ["--help"], prog_name="roundtable", standalone_mode=False) or 0
        end_output()
        return code
    except (UserError, WrongEnvironment) as error:
        return _refuse(error.problems)
    except DataError as error:
        return _refuse(error.problems)
    except Unheard as error:
        return _end_unheard(error)
    except OSError as error:
        try:
            end_output()
        except Unheard as unheard:  # typer prints the help page itself, past `say`
            return _end_unheard(unheard)
        line = why_refused(error)
        if line is None:
            raise
        _refuse([line])
        return 2 if error.errno in WRONG_PATH else 1
    except UnicodeEncodeError as error:
        line = why_not_encoded(error)
        if line is None:
            raise
        return _refuse([line])
    except typer.TyperException as error:
        return _refuse([_wrong_usage(error, given)])
    except KeyboardInterrupt:
        return INTERRUPTED


def _wrong_usage(error: typer.TyperException, given: Sequence[str]) -> str:
    """Typer's message about a wrong command line, with the invalid value added where typer leaves it out."""
    message = " ".join(error.format_message().split()).rstrip(".")
    options = getattr(getattr(error, "param", None), "opts", ())
    values = []
    for word, following in zip(given, [*given[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option in options and option.startswith("-"):
            values.append(value if equals else following)
    if values:  # the last one counts
        message = message.replace("Invalid value for", f"Invalid value {values[-1]!r} for", 1)
    context = getattr(error, "ctx", None)  # that of the command whose words are wrong
    return f"{mask(message)}; see {context.command_path if context is not None else 'roundtable'} --help"


def _refuse(lines: Sequence[str]) -> int:
    """Prints each problem on a line of its own to stderr; returns exit code 2."""
    for line in lines:
        tell(refusal(line))
    return 2


def _end_unheard(error: Unheard) -> int:
    """Ends a command whose output cannot be written, with exit code 1. A pipe closed by its reader is not reported."""
    if not error.is_closed:
        tell(f"standard output takes no more: {error}; give it a place with room")
    drop_output()
    return 1
