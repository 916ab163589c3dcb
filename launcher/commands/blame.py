"""`roundtable blame RUN --step n`: which documents and tokens made a step's loss and gradient. RUN is only read."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.commands.replay import (
    changed_tokens,
    checked_file,
    judge_found,
    open_run_to_read,
    open_tokenizer,
    planned,
    run_plan,
)
from launcher.console import say, tell
from launcher.replay.plan import Plan
from launcher.replay.record import Record
from launcher.training.start import exit_two_for
from parallel.processes.stop import undoing


@dataclass(frozen=True)
class Wishes:
    """What the command line says besides the run, the step and the overrides."""

    ranks: int | None = None
    begin: int | None = None
    leave_out: str | None = None
    top: int = 1
    as_json: bool = False


@undoing()
def blame_step(run: str, step: int, overrides: Sequence[str], wishes: Wishes) -> int:
    """Executes a recorded step again and prints each document's share in it; returns 0 if it is reproduced, else 1.

    Steps are executed from a checkpoint before it on. Raises UserError where an argument or the run is wrong, before
    anything is created.
    """
    run_path, config = open_run_to_read(run, "blame")
    leave_out = checked_file("--leave-out", wishes.leave_out, run_path)
    with planned(run_path, config, step, overrides, ranks=wishes.ranks, begin=wishes.begin) as (plan, record):
        return execute_and_show(plan, record, leave_out, wishes)


def execute_and_show(plan: Plan, record: Record, leave_out: Path | None, wishes: Wishes) -> int:
    """Runs the plan in local processes and prints the report; returns the exit code."""
    from data.without import LeftOut, list_text
    from launcher.blame.report import build_report, print_report
    from launcher.prove.progress import ProofProgress
    from launcher.replay.compare import rounding_notes
    from parallel.processes.start import RankError

    try:
        with ProofProgress(plan.config.run_path) as progress:
            progress.tell(f"steps {plan.begins_at + 1} to {plan.step}")
            found, blamed = run_plan(blame_here, plan)
            verdicts = judge_found(plan, record, found)
    except RankError as error:
        if error.exit_code != 2:  # else the rank has printed its lines
            tell(error)
        return error.exit_code
    is_reproduced = not any(verdict.differences for verdict in verdicts)
    text_of, notes = open_tokenizer(plan)
    if not is_reproduced:
        notes = [*plan.notes, *changed_tokens(plan, {part.file for part in found.parts}), *notes]
    notes = [*rounding_notes(verdicts), *notes]
    texts = {} if text_of is None else beginnings(found, blamed, text_of)
    report = build_report(plan, verdicts, blamed, texts, text_of, notes)
    if leave_out is not None:
        first = [each.document for each in blamed.documents[: wishes.top]]
        listed = [LeftOut(each.name, 0, *each.tokens) for each in first]
        more = [
            {key: row[key] for key in ("blame", "share", "loss")} | {"step": plan.step} for row in report["documents"]
        ]
        leave_out.write_text(list_text(listed, more[: len(listed)]))
    if wishes.as_json:
        say(json.dumps(report))
        return 0 if is_reproduced else 1
    print_report(report)
    if leave_out is not None:
        say(f"\n--leave-out lists the first {wishes.top} for `roundtable branch --without`")
    return 0 if is_reproduced else 1


def beginnings(found: object, blamed: object, text_of: Callable[[int], str]) -> dict[str, str]:
    """The text of each document's first part in the batch, at most TEXT_TOKENS tokens of it, by document name."""
    from launcher.blame.rank import Blamed
    from launcher.blame.report import TEXT_TOKENS
    from launcher.replay.rank import Found

    assert isinstance(found, Found) and isinstance(blamed, Blamed)
    rows = {int(sample): row for row, sample in enumerate(found.indices)}
    texts = {}
    for each in blamed.documents:
        part = each.document.parts[0]
        tokens = found.tokens[rows[part.sample], part.first : min(part.stop, part.first + TEXT_TOKENS)]
        texts[each.document.name] = "".join(text_of(int(token)) for token in tokens)
    return texts


def blame_here(plan: Plan) -> object:
    """One local process's part of `blame`: what ``blame_rank`` returns; a user's mistake ends it with exit code 2."""
    from launcher.blame.rank import blame_rank

    return exit_two_for(lambda: blame_rank(plan))
