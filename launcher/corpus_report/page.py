"""The HTML page about prepared data: tables, bars and samples, with histograms by a script, all in one file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.console import escaped
from launcher.corpus_report.gather import MEASURED, MOST_COUNTED, CorpusFacts, SourceFacts
from launcher.html_text import text
from launcher.report.page import FILES as SHARED
from launcher.report.page import heading, policy

FILES = Path(__file__).parent / "files"
N_COLORS = 7  # in report.css
NO_SCRIPT = "The histograms are drawn by this page's script, which is off."
HEAD = {"documents": "Documents", "lengths": "Document lengths", "reasons": "What was dropped and changed"}
SECTIONS = HEAD | {"copies": "Copies", "tokens": "Tokens and the tokenizer", "samples": "Samples"}


def render(facts: CorpusFacts, made: str) -> str:
    """The page as HTML text; ``made`` is the time that it names."""
    title = text(facts.name)
    library = (SHARED / "uplot.min.js").read_text(encoding="utf-8")
    own = f'(() => {{\n"use strict";\n{(FILES / "corpus.js").read_text(encoding="utf-8")}}})();\n'
    styles = (SHARED / "uplot.min.css", SHARED / "report.css", FILES / "corpus.css")
    styles = [path.read_text(encoding="utf-8") for path in styles]
    links = "".join(f'<a href="#{key}">{text(name)}</a>' for key, name in SECTIONS.items())
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title} - Roundtable data</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy(library, own)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<style>{}</style></head><body>".format("\n".join(styles)),
        f"<header><h1>{title}</h1><p class=remark>Roundtable data of {text(made)}</p>",
        f'<nav aria-label="sections">{links}</nav></header><main>',
        *_body(facts),
        f'</main><script type="application/json" id="data">{_payload(facts)}</script>',
        f"<script>{library}</script>\n<script>{own}</script></body></html>\n",
    ]
    return "\n".join(parts)


def _payload(facts: CorpusFacts) -> str:
    """The data of the histograms as JSON, with ``<`` escaped so that it cannot end its script element."""
    last = max((n for each in facts.sources for n, count in enumerate(each.lengths) if count), default=0)
    lengths = [{"name": escaped(each.name), "counts": each.lengths[: last + 1]} for each in facts.sources]
    sizes = sorted(facts.group_sizes)
    groups = {"sizes": sizes, "counts": [facts.group_sizes[size] for size in sizes]}
    return json.dumps({"lengths": lengths, "groups": groups}).replace("<", "\\u003c")


def _body(facts: CorpusFacts) -> Iterator[str]:
    yield f'<noscript><p class="notes">{text(NO_SCRIPT)}</p></noscript>'
    yield heading("documents", SECTIONS["documents"]) + _documents(facts.sources)
    yield heading("lengths", SECTIONS["lengths"])
    yield '<div class="grid"><figure><figcaption>Documents by their tokens</figcaption>'
    yield '<div class="chart" id="chart-lengths"></div><p class="readout" id="chart-lengths-read"></p></figure></div>'
    yield f"<p class=remark>Of a source, {MOST_COUNTED:,} documents at most are counted; bins double.</p>"
    yield heading("reasons", SECTIONS["reasons"]) + _reasons(facts.sources)
    yield heading("copies", SECTIONS["copies"]) + _copies(facts)
    yield heading("tokens", SECTIONS["tokens"]) + _tokens(facts.sources)
    yield heading("samples", SECTIONS["samples"]) + _samples(facts)


def swatch(number: int) -> str:
    """HTML of a small patch in the colour of the source with this number."""
    return f'<i class="swatch run-{number % N_COLORS}"></i>'


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML of a table whose cells are HTML already; it scrolls by itself where it is too wide."""
    head = "".join(f"<th scope=col>{text(title)}</th>" for title in titles)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def bars(title: str, rows: Sequence[tuple[str, float, str, int]]) -> str:
    """HTML of a bar chart; each row is (label, length, text on the bar, colour's number)."""
    most = max((value for _, value, _, _ in rows), default=0) or 1
    lines = "".join(
        f'<div class="bar"><span>{text(label)}</span><b>{text(told)}</b>'
        f'<i class="run-{color % N_COLORS}" style="width:{100 * value / most:.2f}%"></i></div>'
        for label, value, told, color in rows
    )
    return f"<figure><figcaption>{text(title)}</figcaption>{lines}</figure>"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _documents(sources: Sequence[SourceFacts]) -> str:
    rows = []
    for number, each in enumerate(sources):
        n_dropped = sum(each.dropped.values())
        counts = [each.n_read, each.n_documents, n_dropped]
        told = [f"{count:,}" for count in counts]
        rows.append([swatch(number) + text(each.name), *told, _share(n_dropped, each.n_read), text(each.path)])
    kept = [(each.name, each.n_documents, f"{each.n_documents:,}", n) for n, each in enumerate(sources)]
    lost = [(s.name, n, f"{n:,}", k) for k, s in enumerate(sources) if (n := sum(s.dropped.values()))]
    figures = bars("Kept documents by source", kept) + (bars("Dropped documents by source", lost) if lost else "")
    titles = ("source", "came in", "kept", "dropped", "share dropped", "path")
    return table(titles, rows) + f'<div class="grid">{figures}</div>'


def _reasons(sources: Sequence[SourceFacts]) -> str:
    figures = [
        bars(f"{each.name}: {what}", _sorted(counts, each.n_read, number))
        for number, each in enumerate(sources)
        for what, counts in (("dropped", each.dropped), ("changed", each.changed))
        if counts
    ]
    bad = "".join(f"<li>{text(line)}</li>" for each in sources for line in each.bad)
    listed = f'<h3>Documents that cannot be read</h3><ul class="notes">{bad}</ul>' if bad else ""
    nothing = '<p class="remark">Nothing was dropped or changed.</p>'
    return (f'<div class="grid">{"".join(figures)}</div>' if figures else nothing) + listed


def _sorted(counts: Mapping[str, int], n_read: int, number: int) -> list[tuple[str, float, str, int]]:
    ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return [(reason, count, f"{count:,} ({_share(count, n_read)})", number) for reason, count in ordered]


def _copies(facts: CorpusFacts) -> str:
    if not facts.copies:
        return '<p class="remark">No copies were found, or none were looked for.</p>'
    names = [swatch(number) + text(each.name) for number, each in enumerate(facts.sources)]
    rows = [
        [names[row["of"]], text(row["reason"].replace("_", " ")), names[row["kept_in"]], f"{row['documents']:,}"]
        for row in facts.copies
    ]
    chart = '<div class="chart" id="chart-groups"></div><p class="readout" id="chart-groups-read"></p>'
    figure = f'<div class="grid"><figure><figcaption>Groups of copies by size</figcaption>{chart}</figure></div>'
    return table(("dropped from", "as", "kept in", "documents"), rows) + figure


def _tokens(sources: Sequence[SourceFacts]) -> str:
    rows, fertile = [], []
    for number, each in enumerate(sources):
        words, size = each.tokens_per_word, each.bytes_per_token
        told = [f"{value:.3f}" if value is not None else "-" for value in (words, size)]
        counts = [f"{count:,}" for count in (each.n_train, each.n_heldout)]
        mean = (each.n_train + each.n_heldout) / max(1, each.n_documents)
        rows.append([swatch(number) + text(each.name), *counts, f"{mean:,.1f}", *told, f"{each.n_measured:,}"])
        if words is not None:
            fertile.append((each.name, words, f"{words:.3f}", number))
    titles = (
        "source",
        "to train on",
        "held out",
        "mean of a document",
        "tokens per word",
        "bytes per token",
        "measured on",
    )
    tokens = [(s.name, s.n_train + s.n_heldout, f"{s.n_train + s.n_heldout:,}", n) for n, s in enumerate(sources)]
    figures = bars("Tokens by source", tokens) + (bars("Tokens per word (fertility)", fertile) if fertile else "")
    remark = f"Words are counted in about {MEASURED} documents of a source, evenly spaced, as they are decoded."
    return table(titles, rows) + f'<div class="grid">{figures}</div><p class="remark">{text(remark)}</p>'


def _samples(facts: CorpusFacts) -> str:
    parts = []
    for each in facts.sources:
        for reason, samples in sorted(each.samples.items()):
            shown = "".join(_sample(f"document {s.document} of its shard", s.text, s.beside) for s in samples)
            parts.append(_folded(f"{each.name}: {reason}", shown))
    kinds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for copy in facts.copy_samples:
        kinds.setdefault((copy["source"], copy["reason"]), []).append(copy)
    for (source, reason), copies in sorted(kinds.items()):
        shown = "".join(_sample("dropped, and what is kept", copy["text"], copy["kept"]) for copy in copies)
        parts.append(_folded(f"{facts.sources[source].name}: {reason}", shown))
    return "".join(parts) or '<p class="remark">There are none.</p>'


def _folded(title: str, shown: str) -> str:
    return f"<details><summary>{text(title)}</summary>{shown}</details>"


def _sample(title: str, one: str, other: str) -> str:
    beside = f"<pre>{text(other)}</pre>" if other else ""
    return f'<p class="remark">{text(title)}</p><div class="pair"><pre>{text(one)}</pre>{beside}</div>'
