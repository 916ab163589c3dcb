"""`roundtable replay RUN --step n`: executes a recorded step again and reports on it. RUN is only read."""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import DataError
from data.places import why_no_path, why_not_writable
from launcher.config.tree import RunConfig
from launcher.console import tell
from launcher.errors import UserError
from launcher.limits import check_limits, check_local_ranks
from launcher.replay.plan import Plan, make_plan
from launcher.replay.record import Record, read_record
from launcher.scratch import scratch_folder
from launcher.slurm.follow import find_run
from launcher.training.run_dir import saved_config, start_folder
from launcher.training.start import check_gpus, check_tokens, exit_two_for
from parallel.processes.stop import undoing
from parallel.processes.world import world_size_from_environment

if TYPE_CHECKING:
    from launcher.replay.compare import StepVerdict
    from launcher.replay.rank import Found


@dataclass(frozen=True)
class Wishes:
    """What the command line says besides the run, the step and the overrides."""

    ranks: int | None = None
    begin: int | None = None
    json_file: str | None = None
    html_file: str | None = None
    shows_text: bool = False


@undoing()
def replay_step(run: str, step: int, overrides: Sequence[str], wishes: Wishes) -> int:
    """Executes the step on local processes and reports on it; returns 0 where the record is reproduced, else 1.

    Raises UserError where an argument or the run is wrong, before anything is created.
    """
    run_path, config = open_run_to_read(run, "replay")
    out, page = (checked_file(*each, run_path) for each in (("--json", wishes.json_file), ("--html", wishes.html_file)))
    if out is not None and page is not None and is_one_file(out, page):
        rule = f"must not be the file of --json={wishes.json_file}, which it would replace"
        raise UserError([f"--html={wishes.html_file} {rule}; choose another file"])
    with planned(run_path, config, step, overrides, ranks=wishes.ranks, begin=wishes.begin) as (plan, record):
        return execute_and_show(plan, record, out, page, shows_text=wishes.shows_text)


def open_run_to_read(run: str, command: str) -> tuple[Path, RunConfig]:
    """The run's directory and its config, for a command that starts local processes. Raises UserError."""
    if world_size_from_environment() is not None:
        raise UserError([f"{command} starts its own local processes; run it outside of srun and torchrun"])
    run_path = find_run(run).absolute()
    config = saved_config(run_path)
    if config is None:
        raise UserError([f"RUN={run} holds no config.yaml, so it is no run directory; give a run that has trained"])
    return run_path, config


@contextlib.contextmanager
def planned(
    run_path: Path, config: RunConfig, step: int, overrides: Sequence[str], *, ranks: int | None, begin: int | None
) -> Iterator[tuple[Plan, Record]]:
    """Yields the plan to execute the step again and the run's record, in the folder that the run was started in.

    The plan's scratch folder is removed when the block ends. Raises UserError where the record, the layout or this
    machine does not fit, before anything is created.
    """
    record = read_record(run_path)
    check_local_ranks(ranks)
    with contextlib.chdir(start_folder(run_path, config)), scratch_folder() as scratch:
        plan = make_plan(run_path, record, step, overrides, ranks=ranks, begin=begin, scratch=str(scratch))
        check_limits(plan.n_ranks)
        check_gpus(plan.n_ranks)
        check_tokens(plan.config)
        yield plan, record


def checked_file(option: str, name: str | None, run_path: Path) -> Path | None:
    """The absolute path of the file to write. Raises UserError where it cannot be written, or would lie in the run."""
    if name is None:
        return None
    path = Path(name).absolute()
    rule = why_no_path(name) or why_not_writable(path.parent)
    if rule is None and (not path.parent.is_dir() or path.is_dir()):
        rule = "must be a file in a folder that is there"
    if rule is None and path.resolve().is_relative_to(run_path.resolve()):
        rule = "must lie outside the run directory, which is only read"
    if rule is not None:
        raise UserError([f"{option}={name} {rule}; choose another file"])
    return path


def is_one_file(path: Path, other: Path) -> bool:
    """Whether both paths lead to one file: by the same name, or through a symbolic or hard link."""
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()


def execute_and_show(plan: Plan, record: Record, out: Path | None, page: Path | None, *, shows_text: bool) -> int:
    """Runs the plan in local processes and prints the report; returns the exit code."""
    from launcher.prove.progress import ProofProgress
    from launcher.replay.compare import rounding_notes
    from launcher.replay.report import build_report, documents_of
    from launcher.replay.show import print_documents, print_report
    from parallel.processes.start import RankError

    try:
        with ProofProgress(plan.config.run_path):
            found = run_plan(replay_here, plan)
            verdicts = judge_found(plan, record, found)
    except RankError as error:
        if error.exit_code != 2:  # else the rank has printed its lines
            tell(error)
        return error.exit_code
    is_reproduced = not any(verdict.differences for verdict in verdicts)
    text_of, notes = open_tokenizer(plan)
    notes = [
        *rounding_notes(verdicts),
        *(() if is_reproduced else (*plan.notes, *changed_tokens(plan, {part.file for part in found.parts}))),
        *notes,
    ]
    documents = documents_of(found)
    report = build_report(plan, verdicts, found, documents, text_of, notes)
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    if page is not None:
        from launcher.replay.page import write_page

        write_page(page, report, documents, text_of)
    print_report(report)
    if shows_text:
        print_documents(documents, text_of)
    return 0 if is_reproduced else 1


def run_plan(rank: Callable[[Plan], object], plan: Plan) -> Any:
    """Runs ``rank(plan)`` in each of the plan's local processes; returns rank 0's result. Raises RankError."""
    from parallel.mesh import Degrees
    from parallel.processes.start import run_ranks

    places = Degrees.of(plan.config.parallel, plan.n_ranks).places()
    return run_ranks(rank, plan.n_ranks, plan, preload=["launcher.training.loop"], places=places)[0]


def replay_here(plan: Plan) -> object:
    """One local process's part of `replay`: what ``replay_rank`` returns; a user's mistake ends it with exit code 2."""
    from launcher.replay.rank import replay_rank

    return exit_two_for(lambda: replay_rank(plan))


def judge_found(plan: Plan, record: Record, found: "Found") -> list["StepVerdict"]:
    """A verdict on each executed step: how it differs from the record.

    Where rounding may explain a difference, the steps are first executed again with weights moved by one unit in the
    last place, and a line on stderr says so. Raises RankError where these processes fail.
    """
    from launcher.prove.rounding import DRAWS
    from launcher.replay.compare import judge, moved_by, rounding_may_decide
    from launcher.replay.rounding import numbers_of

    rows = {step: (each.row, each.samples) for step, each in found.steps.items()}
    verdicts = judge(plan, record, rows)
    if not rounding_may_decide(plan, verdicts):
        return verdicts
    first = next(each for verdict in verdicts for each in verdict.differences)
    off = abs(first.replayed / first.recorded - 1)
    tell(
        f"step {first.step}: {first.key} differs from the record by {off:.1e}, relative, beyond the bound of "
        f"{first.bound:.1e}; the steps are executed {DRAWS} times more, with each weight moved by one unit in the last "
        "place, to measure what rounding changes"
    )
    return judge(plan, record, rows, moved_by(numbers_of(found.steps), run_plan(nudged_here, plan)))


def nudged_here(plan: Plan) -> object:
    """One local process's part in measuring how rounding moves the steps' numbers."""
    from launcher.replay.rounding import nudged_rank

    return exit_two_for(lambda: nudged_rank(plan))


def open_tokenizer(plan: Plan) -> tuple[Callable[[int], str] | None, list[str]]:
    """A function from a token id to its text, or None without a tokenizer; and a note where it cannot be used."""
    from data.prepared import locate
    from data.tokenizer import count_ids
    from data.tokenizer_files import load_folder

    prepared = locate(plan.config.data, plan.config.model.vocab_size)
    if prepared is None or prepared.tokenizer is None:
        return None, []
    try:
        tokenizer = load_folder(prepared.tokenizer, "the run's tokenizer", "ids are shown without one")
        n_ids = count_ids(tokenizer)
    except DataError as error:
        return None, error.problems[:1]
    return lambda token: str(tokenizer.decode([token])) if token < n_ids else f"<{token}>", []


def changed_tokens(plan: Plan, files: Iterable[str]) -> list[str]:
    """Lines on token files that may be why a step differs from its record.

    These are prepared files and packings whose hashes have changed, and files written after the checkpoint. ``files``:
    the prefixes of the files that the step read.
    """
    from data.prepared import locate, verify
    from data.tokenfile import bin_path, idx_path
    from parallel.checkpoint.places import is_remote, local_path
    from parallel.checkpoint.store import MANIFEST

    prepared = locate(plan.config.data, plan.config.model.vocab_size)
    lines = [] if prepared is None else verify(plan.config.data, prepared)
    if plan.checkpoint is None or is_remote(plan.checkpoint):
        return lines
    saved = (local_path(plan.checkpoint) / MANIFEST).stat().st_mtime
    for path in (path_of(Path(file)) for file in sorted(files) for path_of in (bin_path, idx_path)):
        changed = path.stat().st_mtime
        if changed > saved:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed))
            lines.append(f"{path} was written ({when}) after the checkpoint of step {plan.begins_at} was")
    return lines
