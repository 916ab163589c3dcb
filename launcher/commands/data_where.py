"""`roundtable data where`: which steps of a run saw a document, or a piece of text."""

from bisect import bisect_left
from typing import Any

from data.document_names import Place
from data.errors import DataError
from data.find_text import find_text
from data.spans import document_name, find_document, samples_with
from data.without import LeftOut
from launcher.commands.branch_without import reads_of
from launcher.commands.data_run import DataOfRun, open_run, say_json
from launcher.commands.data_show import LEFT_OUT
from launcher.console import readable
from launcher.errors import UserError
from launcher.tables import plain_table, wide_console
from launcher.training.ledger_rows import StepData
from launcher.training.lineage import read_lineage


def show_where(name: str, document: str | None, text: str | None, *, as_json: bool) -> int:
    """Prints the steps that were given tokens of the document, or of each place where the text occurs; returns 0.

    Raises UserError where there is no such run, where not exactly one of ``document`` and ``text`` is given, where the
    text is not UTF-8 or the run has no tokenizer; DataError where there is no such document, or a token file is gone.
    """
    if (document is None) == (text is None):
        raise UserError(["--document and --text: one of the two must be given; --document=SOURCE/FILE:NUMBER, say"])
    if text is not None:
        text, problems = readable(text, "--text")
        if problems:
            raise UserError(problems)
    run = open_run(name)
    steps = list(run.steps())
    places = places_of(run, document, text)
    rows = [place_row(run, place, steps) for place in places]
    if as_json:
        say_json({"run": name, "steps": len(steps), "places": rows})
    else:
        print_places(run, len(steps), rows)
    return 0


def places_of(run: DataOfRun, document: str | None, text: str | None) -> list[Place]:
    """The place of the user's document in the token files, or each place where the user's text occurs."""
    if text is None:
        return [find_document(run.dataset, document or "", "--document")]
    if run.tokenizer is None:
        rule = f"needs a tokenizer, and the data of {run.name} names none"
        raise UserError([f"--text={text!r} {rule}; give --document=SOURCE/FILE:NUMBER"])
    return find_text(run.dataset, run.tokenizer, text, "--text")


def place_row(run: DataOfRun, place: Place, steps: list[StepData]) -> dict[str, Any]:
    """A place as ``--json`` prints it: the steps that saw it, and its samples that were left out.

    Token ranges are half-open. ``without``: the run never sees the document (data.without), so all its samples leave it
    out; ``before`` then says what the steps of the run's parent saw of it.
    """
    name = document_name(run.dataset, place.file, place.document)
    seen: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    consumed = steps[-1].consumed
    ends = [step.last_sample for step in steps]
    without = place.first < place.stop and run.dataset.left_out.holds(place.file, place.first)
    for span in samples_with(run.dataset, place, consumed):
        if span.sample < steps[0].begin:  # a branched run's parent trained on it
            continue
        step = steps[bisect_left(ends, span.sample)]
        row = {"sample": span.sample, "tokens": [span.first, span.stop]}
        if without or any(first <= span.sample < stop for first, stop in step.hopped):
            left_out.append(row)
        else:
            seen.append({"step": step.step, **row, "trained": step.trained})
    return {
        "document": name,
        "file": str(run.dataset.files[place.file].prefix),
        "tokens": [place.first, place.stop],
        "without": without,
        "before": before_branch(run, LeftOut(name, place.file, place.first, place.stop)) if without else None,
        "seen": seen,
        "left_out": left_out,
    }


def before_branch(run: DataOfRun, document: LeftOut) -> dict[str, Any] | None:
    """What a branched run's parents saw of a document that the run leaves out; None where the run is no branch.

    ``first_seen``: the first step that trained on it. ``known_from``: the first step that still has a record.
    ``list_first_seen``: the first step that trained on any document of the run's list, as the branch recorded it.
    """
    lineage = read_lineage(run.path)
    if lineage is None:
        return None
    try:
        reads, known_from = reads_of(run, [document])
    except (UserError, DataError):  # the parent's record or token files are others now, or damaged
        reads, known_from = [], lineage.step + 1
    listed = lineage.without
    if listed is not None and listed.first_seen is None:
        known_from = min(known_from, listed.known_from)
    return {
        "run": lineage.run,
        "step": lineage.step,
        "first_seen": min((step for step, _ in reads), default=None),
        "known_from": known_from,
        "list_first_seen": listed.first_seen if listed is not None else None,
    }


def words_of_left_out(before: dict[str, Any] | None) -> str:
    """Words for a document that the run leaves out: whether the weights that it began with were trained on it."""
    if before is None or (before["first_seen"] is None and before["known_from"] == 1):
        return f"never seen, {LEFT_OUT}"
    if before["first_seen"] is not None:
        first, step = before["first_seen"], before["step"]
        seen = f"seen from step {first} on, before the branch at step {step}"
        return f"{LEFT_OUT}, but the weights were trained on it: {seen}"
    line = f"{LEFT_OUT}; no record is left of steps before {before['known_from']}"
    first = before["list_first_seen"]
    return line if first is None else f"{line}, and documents of the list were seen from step {first} on"


def print_places(run: DataOfRun, n_steps: int, rows: list[dict[str, Any]]) -> None:
    """Prints, for each place, a line and a table of the samples that contain it."""
    console = wide_console()
    if not rows:
        console.print(f"no document of {run.name} contains this text")
    for row in rows:
        first, stop = row["tokens"]
        steps = {each["step"] for each in row["seen"]}
        seen = f"seen in {len(steps)} of {n_steps} steps" if steps else f"not seen in {n_steps} steps"
        seen = words_of_left_out(row["before"]) if row["without"] else seen
        console.print(f"{row['document']}, tokens {first} to {stop - 1}: {seen}")
        table = plain_table(">step", ">sample", ">from token", ">up to", "")
        for each in row["seen"]:
            note = "the update was dropped" if each["trained"] is False else ""
            table.add_row(
                str(each["step"]), str(each["sample"]), str(each["tokens"][0]), str(each["tokens"][1] - 1), note
            )
        for each in row["left_out"]:
            table.add_row("-", str(each["sample"]), str(each["tokens"][0]), str(each["tokens"][1] - 1), "left out")
        if table.row_count:
            console.print(table)
