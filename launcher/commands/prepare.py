"""`roundtable prepare`: turns raw text into token files, and shows progress and a summary on stderr."""

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TimeRemainingColumn

from data.config import DataConfig
from data.overlap import n_trained_on
from data.packed import read_packing
from data.packing import n_cut_in_sequence
from data.partial import written_whole
from data.pieces import shares_of
from data.prepare import prepare
from data.prepared import Prepared
from data.remote_index import token_prefix
from data.round_trip import round_trip
from data.shardwriter import dropped_from
from data.tally import NAMED
from data.tokenfile import TokenFile
from launcher.config.tree import RunConfig
from launcher.console import in_a_line, open_console, tell, text_column

MOST_COUNTED = 10_000_000  # documents that a summary counts in the files' indices, in a second or two
PLAIN_LINE_SECONDS = 10.0  # between two lines where there is no terminal


def prepare_shown(config: RunConfig, task: tuple[int, int] | None = None, *, report: bool = False) -> Prepared | None:
    """Prepares the token files that are missing and returns the prepared data; prints a summary at the end.

    Progress is a bar on a terminal and plain lines elsewhere. ``task=(k, n)``: prepares the k-th of n shares only, from
    0; the result is None where other shares are not done. ``report``: also writes an HTML page about the data.
    """
    console = open_console(stderr=True)
    started = time.monotonic()
    with ProgressBar(console) if console.is_terminal else ProgressLines() as shown:
        prepared = prepare(config.data, vocab_size=config.model.vocab_size, progress=shown.update, task=task)
    if prepared is not None:
        found = [*dropped_lines(prepared), *round_trip_lines(config.data, prepared)]
        found += [*packing_lines(config.data, prepared), *overlap_lines(config.data, prepared)]
        tell("\n".join([*found, summary(prepared, time.monotonic() - started)]))
        if report:
            tell(f"report: {in_a_line(str(write_report(config, prepared)))}")
    elif task is not None:
        tell(f"share {task[0] + 1} of {task[1]} is done; {what_is_left(config)}")
    return prepared


def what_is_left(config: RunConfig) -> str:
    """Words on what is still to be done when a task of an array has prepared its share."""
    if config.data.cleaning is None:
        return "the last one finishes the data"
    steps = "clean the texts, find the copies, write the tokens"
    return f"when all shares are, submit the same array again for the next step of: {steps} (docs/cleaning.md)"


def write_report(config: RunConfig, prepared: Prepared) -> Path:
    """Writes an HTML page about the prepared data into token_dir; returns its path."""
    from launcher.corpus_report.gather import gather
    from launcher.corpus_report.page import render
    from launcher.report.page import made_at

    path = Path(config.data.token_dir) / f"report-{config.name}.html"
    page = render(gather(config.name, config.data, prepared), made_at())
    with written_whole(path) as file:
        file.write(page.encode())
    return path


def summary(prepared: Prepared, seconds: float) -> str:
    """One line for each source with its folder, documents and tokens, and one with the seconds that it all took."""
    lines = []
    for part in prepared.sources:
        if part.manifest is None:
            lines.append(f"{part.path}: token files given by the config, nothing to prepare")
            continue
        counts = [
            sum(record.n_tokens for record in records) for records in (part.manifest.train, part.manifest.heldout)
        ]
        documents = sum(record.n_documents for record in part.manifest.files())
        lines.append(f"{part.path}: {documents:,} documents, {counts[0]:,} tokens to train on, {counts[1]:,} held out")
    return "\n".join([*lines, f"prepared in {seconds:.0f} s"])


def packing_lines(data: DataConfig, prepared: Prepared) -> list[str]:
    """One line for each source with the shares of padding and of cut documents in a run's samples.

    Under sequential packing they are counted from the files' indices; a source of more than ``MOST_COUNTED`` documents
    has no line.
    """
    lines = []
    for part in prepared.sources:
        files = [TokenFile(prefix) for prefix in part.prefixes("train")]
        n_documents = sum(file.n_documents for file in files)
        if data.packing == "sequential":
            if not 0 < n_documents <= MOST_COUNTED:
                continue
            counts = [(file.all_starts(), file.n_tokens) for file in files]
            cut = sum(n_cut_in_sequence(*count, data.seq_len) for count in counts) / n_documents
            padding = padding_in_sequence([n_tokens for _, n_tokens in counts], data.seq_len)
        else:
            packings = [read_packing(file, data.seq_len, data.packing) for file in files]
            shares = shares_of(packings, data.seq_len, sum(file.n_tokens for file in files))
            cut, padding = shares["cut"], shares["padding"]
        how = f"packing {data.packing} at data.seq_len={data.seq_len}"
        lines.append(f"{part.path}: {how}: {padding:.2%} padding, {cut:.1%} of the documents split across sequences")
    return lines


def dropped_lines(prepared: Prepared) -> list[str]:
    """Lines for each source that lost documents: how many were kept and left out, the reasons, and the first ones."""
    lines = []
    for part in prepared.sources:
        if part.manifest is None:
            continue
        (dropped, bad), kept = dropped_from(part.path), sum(record.n_documents for record in part.manifest.files())
        if dropped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
            n_documents = kept + sum(dropped.values())
            lines.append(f"{part.path}: {n_documents:,} documents, {kept:,} kept; left out: {reasons}")
            lines += [f"  left out: {line}" for line in bad[:NAMED]]
    return lines


def round_trip_lines(data: DataConfig, prepared: Prepared) -> list[str]:
    """A line for each source whose text is not recovered from its tokens: how many documents, the first difference."""
    lines = []
    for part in prepared.sources:
        if part.manifest is None or prepared.tokenizer is None:
            continue
        told = round_trip(data, part.source, prepared.tokenizer)
        if told is not None and told.n_changed:
            found = f"{part.path}: decoding the tokens of {told.n_changed} of the first {told.n_documents} documents"
            lines.append(f"{found} does not give back the original text ({told.first})")
    return lines


def overlap_lines(data: DataConfig, prepared: Prepared) -> list[str]:
    """A line for each source whose training text holds held-out documents, or one that says that none does.

    Empty where there is no held-out data, or there are more than ``MOST_COUNTED`` training documents to search.
    """
    prefixes = [prefix for part in prepared.sources for prefix in part.prefixes("heldout")]
    heldout = (
        [TokenFile(token_prefix(data, data.heldout_path))]
        if data.heldout_path is not None
        else list(map(TokenFile, prefixes))
    )
    train = {part.path: list(map(TokenFile, part.prefixes("train"))) for part in prepared.sources}
    n_documents = sum(file.n_documents for files in train.values() for file in files)
    if not heldout or n_documents > MOST_COUNTED:
        return []
    counts = {path: n_trained_on(heldout, files) for path, files in train.items()}
    found = [(path, common, n) for path, (common, n) in counts.items() if common]
    lines = [
        f"{path}: {common:,} of {n:,} held-out documents are in its training text, too" for path, common, n in found
    ]
    return lines or ["no held-out document is in the training text"]


def padding_in_sequence(n_tokens: list[int], seq_len: int) -> float:
    """The share of padding under sequential packing, where only each file's last sample is not full."""
    inputs = sum(max(0, n - 1) for n in n_tokens)
    positions = sum(-(-max(0, n - 1) // seq_len) for n in n_tokens) * seq_len
    return 1 - inputs / positions if positions else 0.0


def amount(done: int, total: int, documents: int, tokens: int) -> str:
    """Progress in words: bytes done (of ``total``, 0 where that is not known), documents and tokens."""
    of_all = f" of {total / 1e6:.1f}" if total else ""
    return f"{done / 1e6:.1f}{of_all} MB, {documents:,} documents, {tokens:,} tokens"


class ProgressBar:
    """Shows the progress of `prepare` as a bar on a terminal."""

    def __init__(self, console: Console) -> None:
        columns = (text_column("preparing"), BarColumn(), text_column("{task.description}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, transient=True)
        self.task: TaskID = self.progress.add_task("reading the corpus", total=None)

    def __enter__(self) -> "ProgressBar":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, done: int, total: int, documents: int, tokens: int) -> None:
        """Shows how far the preparation has come."""
        description = amount(done, total, documents, tokens)
        self.progress.update(self.task, completed=done, total=total or None, description=description)


class ProgressLines:
    """Shows the progress of `prepare` as a line every PLAIN_LINE_SECONDS, for logs."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __enter__(self) -> "ProgressLines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, done: int, total: int, documents: int, tokens: int) -> None:
        """Prints the amounts if the last line was at least PLAIN_LINE_SECONDS ago."""
        if time.monotonic() - self.last >= PLAIN_LINE_SECONDS:
            self.last = time.monotonic()
            tell(f"preparing: {amount(done, total, documents, tokens)}")
