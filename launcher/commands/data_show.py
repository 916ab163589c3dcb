"""`roundtable data show`: the documents that a step of a run was trained on, and which of their tokens."""

from typing import Any

from data.fim import Cut
from data.spans import Span, spans_of
from launcher.commands.data_run import DataOfRun, open_run, say_json, span_row
from launcher.tables import plain_table, wide_console
from launcher.training.ledger_rows import StepData

LEFT_OUT = "left out by data.without"


def show_step(name: str, step: int, *, as_json: bool) -> int:
    """Prints the step's samples, sources and spans; returns 0.

    Raises UserError where there is no such run or step, and DataError where a token file is gone.
    """
    run = open_run(name)
    data = run.step(step)
    spans, cuts = list(spans_of(run.dataset, data.samples())), cuts_of(run, data)
    sources, packing = source_rows(run, data, spans), packing_row(run, data, spans)
    if as_json:
        rows = [span_row(run.dataset, span) | fim_row(cuts, span) for span in spans]
        n_targets = run.dataset.count(data.samples())[0]
        say_json(
            {"run": name, **step_row(data), "targets": n_targets, "packing": packing, "sources": sources, "spans": rows}
        )
    else:
        print_step(run, data, spans, cuts, sources, packing)
    return 0


def cuts_of(run: DataOfRun, data: StepData) -> dict[tuple[int, int], Cut]:
    """The fill-in-the-middle cuts of the step's document parts, by sample and first token."""
    samples = data.samples()
    return {(int(samples[row]), cut.first): cut for row, _, cut in run.dataset.cuts(samples)}


def fim_row(cuts: dict[tuple[int, int], Cut], span: Span) -> dict[str, Any]:
    """The key ``fim`` with the span's fill-in-the-middle ranges, in the file's tokens; empty where it has none."""
    cut = cuts.get((span.sample, span.first))
    return {"fim": cut.row()} if cut is not None else {}


def note_of(row: dict[str, Any]) -> str:
    """A note on a span's row: that it is rearranged for fill-in-the-middle, or left out; empty where neither is so."""
    fim = row.get("fim")
    rearranged = [f"{fim['order']}, middle {fim['middle'][0]} to {fim['middle'][1] - 1}"] if fim else []
    return "; ".join([*rearranged, *([LEFT_OUT] if row["left_out"] else [])])


def step_row(data: StepData) -> dict[str, Any]:
    """A step's record as ``--json`` prints it. ``left_out``: half-open ranges before or among its samples."""
    return {
        "step": data.step,
        "sequences": data.n_samples,
        "first_sample": data.first_sample,
        "last_sample": data.last_sample,
        "left_out": [list(each) for each in data.hopped],
        "trained": data.trained,
    }


def source_rows(run: DataOfRun, data: StepData, spans: list[Span]) -> list[dict[str, Any]]:
    """One row for each source: its sequences, documents and tokens in the step, and its epoch after the step.

    Documents and tokens do not count those that the run leaves out.
    """
    dataset = run.dataset
    progress = dataset.progress(data.consumed)
    rows = []
    for number, source in enumerate(dataset.names):
        own = [span for span in spans if dataset.file_sources[span.file] == number]
        row: dict[str, Any] = {"source": source, "path": run.config.data.sources[number].path}
        row |= {"sequences": len({span.sample for span in own})}
        own = [span for span in own if not dataset.left_out.holds(span.file, span.first)]
        row |= {"documents": len({(span.file, span.document) for span in own})}
        rows.append(row | {"tokens": sum(s.stop - s.first for s in own), "epoch": progress[f"data/{source}/epoch"]})
    return rows


def packing_row(run: DataOfRun, data: StepData, spans: list[Span]) -> dict[str, Any]:
    """The kind of packing, the share of the step's positions that are padding, and the share of its documents cut.

    A document is cut where its part in a sequence is neither the whole nor all but the last token, which may be only a
    target.
    """
    dataset = run.dataset
    documents, cut = set(), set()
    for span in spans:
        first, stop = dataset.files[span.file].document_range(span.document)
        documents.add((span.file, span.document))
        if span.first > first or span.stop < stop - 1:
            cut.add((span.file, span.document))
    n_tokens, n_positions = sum(span.stop - span.first for span in spans), data.n_samples * dataset.seq_len
    shares = {"padding": 1 - n_tokens / n_positions, "cut": len(cut) / max(1, len(documents))}
    return {"packing": run.config.data.packing, **shares}


def words_of(data: StepData) -> str:
    """A step's samples in words: how many, their numbers, those left out, and whether the update was dropped."""
    sequences = f"{data.n_samples} sequence{'s' if data.n_samples > 1 else ''}"
    left_out = " and ".join(f"{first} to {stop - 1}" for first, stop in data.hopped)
    fate = {True: "", False: "; not trained on: the update was dropped", None: ""}[data.trained]
    hopped = f", samples {left_out} left out" if left_out else ""
    return f"{sequences}, samples {data.first_sample} to {data.last_sample} of the data order{hopped}{fate}"


def print_step(
    run: DataOfRun,
    data: StepData,
    spans: list[Span],
    cuts: dict[tuple[int, int], Cut],
    sources: list[dict[str, Any]],
    packing: dict[str, Any],
) -> None:
    """Prints lines on the step, its packing and its targets, then a table of its sources and one of its spans."""
    console = wide_console()
    console.print(f"{run.name}, step {data.step}: {words_of(data)}")
    shares = f"{packing['padding']:.1%} of the positions are padding"
    cut = f"{packing['cut']:.1%} of the documents are split across sequences"
    console.print(f"packing {packing['packing']}: {shares}, {cut}")
    n_targets, n_tokens = run.dataset.count(data.samples())
    console.print(f"{n_targets:,} targets count in the loss, of {n_tokens:,} tokens\n")
    table = plain_table("source", ">sequences", ">documents", ">tokens", ">epoch after the step", "path")
    for row in sources:
        counts = (f"{row[key]:,}" for key in ("sequences", "documents", "tokens"))
        table.add_row(row["source"], *counts, f"{row['epoch']:.3f}", row["path"])
    console.print(table, "")
    has_masks = run.dataset.masks.any
    names = [">sample", "document", ">from token", ">up to", ">offset in the document"]
    table = plain_table(*names, *(["targets"] * has_masks), "")
    for row in (span_row(run.dataset, span) | fim_row(cuts, span) for span in spans):
        first, stop = row["tokens"]
        ranges = [f"{begin}-{end - 1}" if end - begin > 1 else str(begin) for begin, end in row.get("targets", [])]
        targets = [" ".join(ranges) if "targets" in row else "all"] if has_masks else []
        table.add_row(
            str(row["sample"]), row["document"], str(first), str(stop - 1), str(row["offset"]), *targets, note_of(row)
        )
    console.print(table)
