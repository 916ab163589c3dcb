"""The command-line arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.completion import offer_checkpoints, offer_files, offer_overrides, offer_runs

# The panels of `roundtable --help`, in the order in which they are shown: that of their first commands.
SETUP = "Setup"
DATA = "Data"
TRAINING = "Training and runs"
PLANNING = "Proof and planning"
CLUSTER = "Clusters and Slurm"
CHECKPOINTS = "Checkpoints and models"
ANALYSIS = "Analysis"


def switch(*names: str, text: str) -> Any:
    """An option without a value; Typer's help would show it with the type ``<bool>``, as if it took one."""
    return typer.Option(*names, help=text, metavar="")


ConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML config. Keys that it leaves out have their defaults.",
        show_default=False,
        autocompletion=offer_files,
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Config keys to override, with dots: optimizer.lr=2e-4 parallel.tp=2.",
        show_default=False,
        autocompletion=offer_overrides,
    ),
]
LayoutArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Another layout to compute on: parallel.tp=2 parallel.zero=1 (default: the run's own).",
        show_default=False,
        autocompletion=offer_overrides,
    ),
]
LocalRanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        min=1,
        help="Number of local processes (default: one for each GPU, or 1). Leave it out under srun or torchrun.",
        show_default=False,
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="GPU",
        help="Estimate for this GPU instead of measuring here: a name such as H200, or a YAML file that describes it.",
        show_default=False,
    ),
]
NewFolderOption = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="The folder to write; must be new or empty (default: profile-NAME, by the config's name).",
        show_default=False,
    ),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        min=1,
        help="Check the config for N processes (default: the fewest that its layout can run on).",
        show_default=False,
    ),
]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A run directory (for its newest good checkpoint), one checkpoint's directory, or a URL.",
        show_default=False,
        autocompletion=offer_checkpoints,
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run directory, or the name of a run in the folder runs.",
        show_default=False,
        autocompletion=offer_runs,
    ),
]
OtherRunArgument = Annotated[
    str,
    typer.Argument(
        metavar="OTHER_RUN",
        help="The run to compare it with, likewise.",
        show_default=False,
        autocompletion=offer_runs,
    ),
]
StepOption = Annotated[
    int, typer.Option("--step", metavar="N", min=1, help="The step to execute again.", show_default=False)
]
RanksOfRunOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        min=1,
        help="Number of local processes (default: as many as the run had).",
        show_default=False,
    ),
]
BeginOption = Annotated[
    int | None,
    typer.Option(
        "--from",
        metavar="N",
        min=0,
        help="Begin at the checkpoint of step N; 0: at the initial weights (default: the last one before --step).",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, switch("--json", text="Print JSON instead of text.")]
DirArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="A run directory (for all its checkpoints), one checkpoint's directory, or a URL.",
        show_default=False,
        autocompletion=offer_checkpoints,
    ),
]
