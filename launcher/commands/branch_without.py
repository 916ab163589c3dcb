"""`roundtable branch --without`: which documents a branch is to leave out, and from which checkpoint it begins."""

import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.document_names import Place
from data.spans import samples_with
from data.without import LeftOut, Listed, find_listed, hash_of_list, list_text, read_list
from launcher.commands.data_run import DataOfRun, open_run
from launcher.commands.trained import find_candidates
from launcher.errors import UserError
from launcher.training.lineage import Without, read_lineage
from parallel.checkpoint.store import step_of

KEY = "--without"


@dataclass(frozen=True)
class Choice:
    """The checkpoint that a branch begins with, and what it leaves out."""

    step: int
    documents: tuple[LeftOut, ...]  # all that the branch leaves out, those of its parent included
    n_given: int  # the number of documents that the user named
    n_seen: int  # how many of the named documents had been seen by ``step``
    first_seen: int | None  # the first step that saw one of the named documents, if it is not after ``step``
    next_seen: int | None  # the first step after ``step`` in which the run saw one of them
    known_from: int  # the first step whose record is there
    taken_over: Without | None  # the parent's record of its own left-out documents

    @property
    def text(self) -> str:
        """The content of the branch's list of left-out documents."""
        return list_text(self.documents)

    @property
    def record(self) -> Without:
        """The record of all left-out documents that the branch's lineage file keeps."""
        listed = [Listed(each.document) for each in self.documents]
        firsts = [self.first_seen, self.taken_over.first_seen if self.taken_over is not None else None]
        first_seen = min((each for each in firsts if each is not None), default=None)
        return Without(len(self.documents), hash_of_list(listed), first_seen, self.known_from)

    def words(self) -> str:
        """A sentence on whether the branch's weights were trained on the named documents, for the user."""
        documents, it, them = f"the {self.n_given} documents", "one of them", "them"
        if self.n_given == 1:
            documents, it, them = "the document", "it", "it"
        known = "" if self.known_from == 1 else f"; of steps before {self.known_from} no record is left"
        if self.n_seen:
            which = it if self.n_given == 1 else f"{self.n_seen} of {documents}"
            seen = (
                f"{which} had been seen by then, first in step {self.first_seen}, and no checkpoint from before is left"
            )
            trained_on = "it" if self.n_given == 1 else "some of them"
            remedy = f"begin a new run with data.without to never see {them}"
            return f"{seen}{known}; so its weights were trained on {trained_on}: {remedy}"
        first = "" if self.next_seen is None else f" (the run first saw {it} in step {self.next_seen})"
        return f"no step up to then had seen {documents}{first}{known}; the branch never sees {them}"


def read_names(given: Sequence[str]) -> list[Listed]:
    """The documents that ``--without`` names, directly or in files that list them. Raises DataError for a bad file."""
    found = []
    for each in given:
        is_file = "\0" not in each and os.path.lexists(each)
        found += read_list(each, KEY) if is_file else [Listed(each)]
    return found


def choose(run_path: Path, step: int, listed: Sequence[Listed]) -> Choice:
    """The newest of the run's checkpoints up to ``step`` from before any of the ``listed`` documents was seen.

    Where there is no such checkpoint, the newest of those before which the documents were read the fewest times.
    Raises UserError for a step that was not reached, or where no checkpoint is left, and DataError for a document that
    the run's data lack.
    """
    run = open_run(str(run_path))
    documents = find_listed(run.dataset.document_names, listed, KEY)
    reached = max((each.step for each in run.steps()), default=0)
    if step > reached:
        raise UserError([f"--step={step} was not reached in {run_path}, which has made {reached}; give one up to that"])
    there = [number for each in find_candidates(run_path, "RUN")[1] if (number := step_of(each.name)) is not None]
    before = [number for number in there if number <= step]
    if not before:
        shown = ", ".join(map(str, there)) or "none"
        rule = f"needs a checkpoint of {run_path} of that step or before it, and those left are {shown}"
        raise UserError([f"--step={step} {rule}; give a later step"])
    reads, known_from = reads_of(run, documents)
    lineage = read_lineage(run_path)
    n_before = {number: sum(read <= number for read, _ in reads) for number in before}
    chosen = max(before, key=lambda number: (-n_before[number], number))
    seen = [read for read in reads if read[0] <= chosen]
    after = [read for read, _ in reads if read > chosen]
    own = {each.document: each for each in (*run.dataset.left_out.documents, *documents)}
    return Choice(
        step=chosen,
        documents=tuple(sorted(own.values(), key=lambda each: (each.file, each.first, each.document))),
        n_given=len(documents),
        n_seen=len({document for _, document in seen}),
        first_seen=min((read for read, _ in seen), default=None),
        next_seen=min(after, default=None),
        known_from=known_from,
        taken_over=lineage.without if lineage is not None else None,
    )


def reads_of(run: DataOfRun, documents: Sequence[LeftOut]) -> tuple[list[tuple[int, str]], int]:
    """(step, document) for each step that trained on tokens of a document, and the first step whose record is there.

    The steps before a branched run's own are read from its parent's record, and so on as far as parents are there.
    """
    found: list[tuple[int, str]] = []
    passed, last_step = set[Path](), math.inf
    while True:
        own = [(step, each.document) for each in documents for step in steps_with(run, each) if step <= last_step]
        found = [*own, *found]
        lineage = read_lineage(run.path)
        if lineage is None:
            return found, 1
        passed.add(run.path.resolve())
        if not lineage.is_there() or Path(lineage.run).resolve() in passed:  # a record may name a cycle
            return found, lineage.step + 1
        run, last_step = open_run(lineage.run), min(last_step, lineage.step)


def steps_with(run: DataOfRun, document: LeftOut) -> set[int]:
    """The run's own steps that trained on tokens of a document; none where the run leaves it out."""
    steps = list(run.steps())
    if document.first == document.stop or run.dataset.left_out.holds(document.file, document.first):
        return set()
    ends, found = [step.last_sample for step in steps], set()
    number = int(document.document.rpartition(":")[2])
    place = Place(document.file, number, document.first, document.stop)
    for span in samples_with(run.dataset, place, steps[-1].consumed):
        step = steps[bisect_left(ends, span.sample)]
        is_left_out = any(first <= span.sample < stop for first, stop in step.hopped)
        if span.sample >= steps[0].begin and not is_left_out and step.trained is not False:
            found.add(step.step)
    return found
