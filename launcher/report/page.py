"""Renders the report as one HTML file: static tables and texts, the data as JSON, and the script that draws it."""

import base64
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.config.dump import describe_config
from launcher.config.secrets import mask
from launcher.console import escaped
from launcher.html_text import text
from launcher.report.curves import MOST_POINTS
from launcher.report.events import Told, kind_of, tone_of
from launcher.report.gather import RunFacts
from launcher.report.panels import panels_of
from launcher.report.read import MOST_SAMPLED
from launcher.report.summary import (
    Table,
    checkpoints_table,
    differences_table,
    environment_table,
    plan_table,
    sources_table,
    starts_table,
    summary_table,
)

FILES = Path(__file__).parent / "files"
SCRIPTS = ("dom.js", "core.js", "curves.js", "timeline.js", "heat.js", "page.js")
N_COLORS = 7  # colors of runs in report.css
LONG = 40  # letters; a longer text in a cell may be wrapped anywhere
LONGEST_CONFIG = 200_000  # letters

HELP = (
    "Drag over a figure to zoom all of them, double-click to see the whole run. By keyboard: Tab to a figure, arrow "
    "keys to read it, + and - to zoom, Escape for the whole run. Triangles mark events, which are listed below."
)
NO_SCRIPT = "The curves and maps are drawn by this page's script, which is off."

TITLES = {
    "training": "Loss, learning rate, norms",
    "speed": "Speed and memory",
    "experts": "Experts",
    "data": "Data sources",
    "others": "Other numbers",
}


def render(runs: Sequence[RunFacts], made: str) -> str:
    """The HTML of the page of these runs; ``made`` is the time to show as that of the report."""
    title = text(", ".join(run.name for run in runs))
    library, own = (FILES / "uplot.min.js").read_text(encoding="utf-8"), own_script()
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title} - Roundtable report</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy(library, own)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{(FILES / 'uplot.min.css').read_text()}\n{(FILES / 'report.css').read_text()}</style></head><body>",
        f"<header><h1>{title}</h1><p class=remark>Roundtable report of {text(made)}</p>{navigation(runs)}</header>",
        "<main>",
        *body(runs),
        f"</main>{footer(runs)}",
        f'<script type="application/json" id="data">{payload(runs)}</script>',
        f"<script>{library}</script>\n<script>{own}</script></body></html>\n",
    ]
    return "\n".join(parts)


def made_at() -> str:
    """The present local time, as the page shows it."""
    return time.strftime("%Y-%m-%d %H:%M")


def own_script() -> str:
    """The page's own script, without the plotting library."""
    return one_script([FILES / name for name in SCRIPTS])


def one_script(files: Sequence[Path]) -> str:
    """The files as one script in a function, so that its names are not global."""
    lines = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return f'(() => {{\n"use strict";\n{lines}}})();\n'


def policy(*scripts: str) -> str:
    """The content security policy: only these scripts may run, and nothing is fetched, even if a text holds HTML."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"


def payload(runs: Sequence[RunFacts]) -> str:
    """The data that the script draws, as JSON with escaped texts and without ``<``, which could end its element."""
    drawn = [run.data for run in runs]
    tones = {kind: tone_of(kind) for kind in kinds_of(runs)}
    tree = shown({"runs": drawn, "panels": panels_of(drawn), "tones": tones})
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def kinds_of(runs: Sequence[RunFacts]) -> list[str]:
    """The kinds of events in the runs, the most severe first."""
    order = ("bad", "warn", "note", "routine")
    kinds = dict.fromkeys(kind_of(event) for run in runs for event in run.rows.events)
    return sorted(kinds, key=lambda kind: order.index(tone_of(kind)))


def shown(tree: Any) -> Any:
    """The tree with control characters escaped in each text and key; lists of numbers are returned as they are."""
    match tree:
        case str():
            return escaped(tree)
        case dict():
            return {escaped(str(key)): shown(value) for key, value in tree.items()}
        case list() if tree and isinstance(tree[0], str | dict):
            return [shown(item) for item in tree]
        case _:
            return tree


def sections(runs: Sequence[RunFacts]) -> dict[str, str]:
    """The titles of the sections that this page has, by their ids, in order."""
    used = {panel["section"] for panel in panels_of([run.data for run in runs])}
    found = {"summary": "Summary"}
    found |= {key: TITLES[key] for key in ("training", "speed") if key in used}
    found |= {"events": "Events and health"}
    found |= {key: TITLES[key] for key in ("experts",) if key in used or any(run.data.get("experts") for run in runs)}
    found |= {"data-sources": TITLES["data"], "checkpoints": "Checkpoints", "plan": "Layout, plan and measurement"}
    found |= {"environment": "Environment", "config": "Config"}
    return found | ({"others": TITLES["others"]} if "others" in used else {})


def navigation(runs: Sequence[RunFacts]) -> str:
    """HTML of the links to the page's sections."""
    links = (f'<a href="#{key}">{text(title)}</a>' for key, title in sections(runs).items())
    return f'<nav aria-label="sections">{"".join(links)}</nav>'


def body(runs: Sequence[RunFacts]) -> Iterator[str]:
    """HTML of the page's sections, in order."""
    known = sections(runs)
    yield from notes(runs)
    yield heading("summary", known["summary"])
    yield tiles(summary_table(runs)) if len(runs) == 1 else table_html(summary_table(runs), runs)
    yield f'<noscript><p class="notes">{text(NO_SCRIPT)}</p></noscript>'
    yield f'<div id="toolbar" role="toolbar" aria-label="figures"></div><p class="remark">{text(HELP)}</p>'
    for key in ("training", "speed"):
        if key in known:
            yield heading(key, known[key]) + f'<div class="grid" id="curves-{key}"></div>'
    yield heading("events", known["events"]) + events_html(runs)
    if "experts" in known:
        yield heading("experts", known["experts"]) + experts_html(runs)
    yield heading("data-sources", known["data-sources"]) + table_html(sources_table(runs), runs)
    yield '<div class="grid" id="curves-data"></div>'
    yield heading("checkpoints", known["checkpoints"]) + table_html(checkpoints_table(runs), runs)
    yield heading("plan", known["plan"]) + table_html(starts_table(runs), runs)
    yield "<h3>Plan beside measurement, last start</h3>" + table_html(plan_table(runs), runs)
    yield heading("environment", known["environment"]) + table_html(environment_table(runs), runs)
    yield heading("config", known["config"]) + config_html(runs)
    if "others" in known:
        yield heading("others", known["others"]) + '<div class="grid" id="curves-others"></div>'


def heading(key: str, title: str) -> str:
    """HTML of a section's title with the id that links lead to."""
    return f'<h2 id="{key}">{text(title)}</h2>'


def notes(runs: Sequence[RunFacts]) -> Iterator[str]:
    """HTML of the runs' notes, nothing where there is none."""
    if len(runs) == 1:
        lines = [text(note) for note in runs[0].notes]
    else:
        lines = [f"<b>{text(run.name)}</b>: {text(' '.join(run.notes))}" for run in runs if run.notes]
    if lines:
        yield f'<ul class="notes">{"".join(f"<li>{line}</li>" for line in lines)}</ul>'


def tiles(table: Table) -> str:
    """HTML of one run's summary table as tiles, label over value."""
    pairs = (f"<div><dt>{text(label)}</dt><dd>{text(value)}</dd></div>" for label, value in table.rows)
    return f'<dl class="tiles">{"".join(pairs)}</dl>'


def swatch(number: int) -> str:
    """HTML of a patch in the run's colour."""
    return f'<i class="swatch run-{number % N_COLORS}"></i>'


def table_html(table: Table, runs: Sequence[RunFacts]) -> str:
    """HTML of a table that scrolls sideways where it is too wide; a table without rows becomes a remark."""
    if not table.rows:
        return '<p class="remark">Nothing is recorded.</p>'
    named = table.runs is not None and len(runs) > 1
    titles = ["<th scope=col>run</th>"] if named else []
    for number, title in enumerate(table.titles):
        mark = swatch(number - 1) if table.runs is None and number and len(runs) > 1 else ""
        titles.append(f"<th scope=col>{mark}{text(title)}</th>")
    lines = []
    for place, row in enumerate(table.rows):
        cells = [cell(value) for value in row]
        if table.runs is None:
            cells[0] = f"<th scope=row>{text(row[0])}</th>"
        elif named:
            run = table.runs[place]
            cells.insert(0, f"<td>{swatch(run)}{text(runs[run].name)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    kind = ' class="columns"' if table.runs is None else ""
    remark = f'<p class="remark">{text(table.remark)}</p>' if table.remark else ""
    head = f"<thead><tr>{''.join(titles)}</tr></thead>"
    return f'<div class="scroll" tabindex="0"><table{kind}>{head}<tbody>{"".join(lines)}</tbody></table></div>{remark}'


def cell(value: str) -> str:
    """HTML of a cell; a text of more than LONG letters may be wrapped anywhere."""
    return f"<td{' class=long' if len(value) > LONG else ''}>{text(value)}</td>"


def events_html(runs: Sequence[RunFacts]) -> str:
    """HTML of the time line and the table of events."""
    if not any(run.rows.events for run in runs):
        return '<p class="remark">No event is recorded.</p>'
    rows = [event_row(number, run, each, len(runs)) for number, run in enumerate(runs) for each in run.told]
    run_title = "<th scope=col>run</th>" if len(runs) > 1 else ""
    head = f"<thead><tr>{run_title}<th scope=col>step</th><th scope=col>event</th><th scope=col>what</th></tr></thead>"
    left_out = sum(run.n_not_told for run in runs)
    remark = f'<p class="remark">{left_out:,} more are in metrics.jsonl.</p>' if left_out else ""
    table = f'<div class="scroll" tabindex="0"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'
    summary = f"<summary>{len(rows):,} events as a table</summary>"
    return f'<div id="timeline"></div><details{" open" * (len(rows) <= 12)}>{summary}{table}{remark}</details>'


def event_row(number: int, run: RunFacts, each: Told, n_runs: int) -> str:
    """HTML of one event's row."""
    name = f"<td>{swatch(number)}{text(run.name)}</td>" if n_runs > 1 else ""
    tag = f'<span class="tag {each.tone}">{text(each.kind.replace("_", " "))}</span>'
    return f"<tr>{name}<td>{each.step:,}</td><td>{tag}</td><td class=long>{text(each.text)}</td></tr>"


def experts_html(runs: Sequence[RunFacts]) -> str:
    """HTML of the experts section: curves of all runs, then each run's maps."""
    parts = ['<div class="grid" id="curves-experts"></div>']
    if any(run.data.get("layers") or run.data.get("experts") for run in runs):
        parts.append(
            '<p class="scale"><span>load: idle <i></i> four times the mean or more, balanced between them</span>'
            '<span>entropy: low <i class="part"></i> high</span></p>'
        )
    for number, run in enumerate(runs):
        if not (run.data.get("layers") or run.data.get("experts")):
            continue
        parts.append(f"<h3>{swatch(number) if len(runs) > 1 else ''}{text(run.name)}</h3>")
        experts = run.data.get("experts")
        if experts:
            n_columns, n_rows = len(experts["steps"]), experts["rows"]
            which = "all" if n_columns == n_rows else f"{n_columns:,}, evenly spaced,"
            parts.append(
                f'<p class="remark">Maps of experts show {which} of {n_rows:,} recorded steps with shares.</p>'
            )
        parts.append(f'<div id="maps-{number}"></div>')
    return "".join(parts)


def config_html(runs: Sequence[RunFacts]) -> str:
    """HTML of the config section: keys in which the runs differ, then each run's config."""
    parts = []
    if len(runs) > 1:
        differences = differences_table(runs)
        equal = '<p class="remark">The configs are equal but for names and places.</p>'
        parts.append(table_html(differences, runs) if differences.rows else equal)
    for run in runs:
        if run.config is not None:
            lines = mask(describe_config(run.config))[:LONGEST_CONFIG]
            parts.append(f"<details><summary>config of {text(run.name)}</summary><pre>{text(lines)}</pre></details>")
    return "".join(parts) or '<p class="remark">No config can be read.</p>'


def footer(runs: Sequence[RunFacts]) -> str:
    """HTML of the footer, which says where the numbers are from and how they were averaged."""
    most = max((run.data["updates"] for run in runs), default=0)
    lines = ["All numbers are from metrics.jsonl, the config and the folder of checkpoints; nothing was run again."]
    points = max((len(run.data.get("first", ())) for run in runs), default=0)
    if most > points:
        lines.append(
            f"Runs with more updates than a curve has points (here {points:,}, at most {MOST_POINTS:,}) are drawn in "
            "buckets of neighbouring updates: the line is the mean, the band reaches from the lowest to the highest "
            "value of each bucket, so no spike is lost; the text below a figure names the step of the highest one."
        )
    lines.append("Values that are not finite are gaps in a curve; the events say which steps had them.")
    if any(run.data.get("experts") for run in runs):
        lines.append(f"Of the rows with shares of experts at most {MOST_SAMPLED} and the last are read.")
    return f"<footer>{''.join(f'<p class=remark>{text(line)}</p>' for line in lines)}</footer>"
