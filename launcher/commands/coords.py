"""`roundtable coords CONFIG OUT`: the coordinate check, a picture of activations' sizes as the model gets wider."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.console import open_console, say, tell
from launcher.coords.draw import TITLES, draw
from launcher.coords.judge import Slopes, faults, slopes_of
from launcher.coords.measure import (
    PARAMETRIZATIONS,
    Coordinates,
    Parametrization,
    measure,
    small_relative,
    widened,
)
from launcher.errors import UserError
from launcher.tables import plain_table, wide_console
from launcher.watch.picture import check_picture, save_picture
from modeling.config import NO_FAMILY, ModelConfig
from modeling.families.family import family_of
from parallel.config import ParallelConfig

TIMES = (4, 8, 16, 32)  # multiples of the shrunk model's width that are measured without --widths
SEQ_LEN = 32


def check_coordinates(
    path: Path, out: str, overrides: Sequence[str], widths: str | None, steps: int, as_json: bool
) -> int:
    """Draws the sizes of activations over the width and prints their growth; returns 0 where muP keeps each, else 1.

    Shrunk models of several widths take ``steps`` updates under muP and under the standard parametrization. Raises
    UserError where the config, the widths or OUT are wrong, or muP is not possible for the model.
    """
    config = load_config(path, overrides)
    target = Path(out)
    check_picture(target, "OUT", "coords.png")
    refuse([each for each in check(config, 1) if each.startswith(("model.", "optimizer."))])
    small = small_relative(config)
    sizes = read_widths(widths, small)
    models = {each: [widened(small, width, sizes[0], each) for width in sizes] for each in PARAMETRIZATIONS}
    refuse([*unfit_family(small, models["mup"])])
    refuse([*dict.fromkeys(line for each in models.values() for model in each for line in check_model(config, model))])
    measured: dict[Parametrization, Coordinates] = {}
    with ExitStack() as stack:
        shown = show_progress(stack)
        for each in PARAMETRIZATIONS:
            measured[each] = measure(
                models[each],
                config.optimizer,
                steps=steps,
                seq_len=SEQ_LEN,
                seed=config.seed,
                tell=lambda width, each=each: shown(f"{each}: d_model={width}"),
            )
    slopes = slopes_of(measured)
    rule = config.optimizer
    title = f"{config.name}: coordinate check, {rule.name} at lr {rule.lr:g}, {small.n_layers} layers"
    save_picture(draw(title, measured, slopes), target, "OUT")
    problems = [*faults(slopes)]
    if as_json:
        say(json.dumps(to_json(measured, slopes, problems, steps, rule.lr)))
    else:
        print_slopes(slopes)
        for line in problems:
            say(line)
        passed = "passed: under muP, activations and their changes keep their size as the width grows"
        say("failed: under muP, these sizes or changes depend on the width" if problems else passed)
        say(str(target))
    return 1 if problems else 0


def refuse(lines: list[str]) -> None:
    """Raises UserError with these lines, if there are any."""
    if lines:
        raise UserError(lines)


def unfit_family(small: ModelConfig, widened: Sequence[ModelConfig]) -> Iterator[str]:
    """A line for each thing that muP needs at several widths and the family's `transformers` class cannot express."""
    if small.family == NO_FAMILY:
        return
    family, narrowest = family_of(small.family), widened[0]
    allowed = family.expressible.get("logit_divisor")
    if small.tie_embeddings and allowed is not None and any(each.logit_divisor not in allowed for each in widened):
        yield (
            f"model.tie_embeddings=true is not possible under muP with model.family={small.family}, whose "
            f"`transformers` class divides no logits (muP's head is smaller than the embedding, whose weight it is "
            f"here); try model.tie_embeddings=false, or model.family=none"
        )
    for key, value_for in family.derived.items():
        if any(value_for(replace(each, d_model=narrowest.d_model)) != value_for(each) for each in widened):
            yield (
                f"model.family={small.family} is not possible under muP, for its `transformers` class derives "
                f"model.{key} from model.d_model (muP needs a number that stays as the width grows); try "
                f"model.family=none"
            )


def check_model(config: RunConfig, model: ModelConfig) -> list[str]:
    """One line for each rule on the model that ``model`` breaks, on one process with sequences of SEQ_LEN."""
    data = replace(config.data, seq_len=SEQ_LEN)
    lines = check(replace(config, model=model, data=data, parallel=ParallelConfig()), 1)
    return [line for line in lines if line.startswith("model.")]


def read_widths(text: str | None, small: ModelConfig) -> list[int]:
    """The widths, ascending, or TIMES that of the shrunk model. Raises UserError unless each is a multiple of it."""
    usual = ",".join(str(times * small.d_model) for times in TIMES)
    try:
        widths = sorted({int(part) for part in (text or usual).split(",")})
    except ValueError:
        raise UserError([f"--widths={text} must be whole numbers with commas between; try {usual}"]) from None
    if len(widths) < 2:
        raise UserError([f"--widths={text} must be two widths or more; try {usual}"])
    if widths[0] < 1 or any(width % small.d_model for width in widths):
        raise UserError(
            [
                f"--widths={text} must be multiples of {small.d_model} (the model's heads, as `roundtable prove` "
                f"shrinks them); try {usual}"
            ]
        )
    return widths


def show_progress(stack: ExitStack) -> Callable[[str], None]:
    """A function that shows on stderr what begins: in one changing line on a terminal, in plain lines elsewhere."""
    console, started = open_console(stderr=True), time.monotonic()
    status = stack.enter_context(console.status("")) if console.is_terminal else None

    def shown(what: str) -> None:
        seconds = time.monotonic() - started
        if status is not None:
            status.update(Text(f"{what} ({seconds:.0f} s)"))
        else:
            tell(f"{seconds:5.1f} s  {what}")

    return shown


def print_slopes(slopes: Slopes) -> None:
    """Prints a table with, for each activation, the power of the width with which its size and its change grow."""
    table = plain_table("activation", ">muP: size", ">change", ">standard: size", ">change")
    for name in slopes["mup"]:
        powers = [slopes[each][name][kind] for each in PARAMETRIZATIONS for kind in ("sizes", "changes")]
        table.add_row(TITLES.get(name, name), *(f"{power:+.2f}" for power in powers))
    wide_console().print(table)


def to_json(
    measured: dict[Parametrization, Coordinates], slopes: Slopes, problems: list[str], steps: int, lr: float
) -> dict[str, object]:
    """All measurements for ``--json``: rows of ``sizes`` and ``changes`` are updates, columns are widths."""
    told = {
        each: {
            name: {
                "slopes": slopes[each][name],
                "sizes": coordinates.sizes[name].tolist(),
                "changes": coordinates.changes[name].tolist(),
            }
            for name in coordinates.sizes
        }
        for each, coordinates in measured.items()
    }
    widths = list(measured["mup"].widths)
    return {"widths": widths, "steps": steps, "lr": lr, "flat": not problems, "problems": problems, **told}
