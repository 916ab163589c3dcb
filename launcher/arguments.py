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
    typer.Argument(metavar="CONFIG", help="A YAML config.", show_default=False, autocompletion=offer_files),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Dotted overrides, e.g. optimizer.lr=2e-4 parallel.tp=2.",
        show_default=False,
        autocompletion=offer_overrides,
    ),
]
LayoutArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Another layout, e.g. parallel.tp=2 parallel.zero=1.",
        show_default=False,
        autocompletion=offer_overrides,
    ),
]
LocalRanksOption = Annotated[
    int | None,
    typer.Option("--ranks", min=1, help="Local processes (default: one for each GPU, or one).", show_default=False),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="GPU",
        help="Estimate for a GPU that is not here: H200, H100, ..., or a YAML file.",
        show_default=False,
    ),
]
NewFolderOption = Annotated[
    str | None,
    typer.Option("--out", metavar="DIR", help="A new folder (default: profile-NAME).", show_default=False),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        min=1,
        help="Processes that the config is checked for (default: the fewest that its layout takes).",
        show_default=False,
    ),
]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A run directory, a checkpoint's, or its URL.",
        show_default=False,
        autocompletion=offer_checkpoints,
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run directory or name.", show_default=False, autocompletion=offer_runs),
]
StepOption = Annotated[int, typer.Option("--step", metavar="N", min=1, help="The step.", show_default=False)]
RanksOfRunOption = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Local processes (default: the run's).", show_default=False)
]
BeginOption = Annotated[
    int | None,
    typer.Option("--from", metavar="N", min=0, help="The checkpoint (default: the nearest).", show_default=False),
]
JsonOption = Annotated[bool, switch("--json", text="Print JSON.")]
DirArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="A checkpoint's directory or URL, or a run directory.",
        show_default=False,
        autocompletion=offer_checkpoints,
    ),
]
