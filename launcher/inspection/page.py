"""The HTML page in one file: checks and tables as text, the findings as JSON, and the script that draws them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.console import in_a_line
from launcher.html_text import text
from launcher.inspection.asked import spread
from launcher.inspection.words import (
    EXPERT_TITLES,
    HEAD_TITLES,
    LENS_TITLES,
    check_lines,
    counted,
    expert_rows,
    experts_of,
    head_rows,
    headline,
    lens_rows,
)
from launcher.report.heat import packed, part_codes
from launcher.report.page import FILES as REPORT_FILES
from launcher.report.page import one_script, policy, shown

FILES = Path(__file__).parent / "files"
SCRIPTS = (REPORT_FILES / "dom.js", *(FILES / name for name in ("map.js", "strip.js", "inspect.js")))
STYLES = (REPORT_FILES / "report.css", FILES / "inspect.css")
TITLES = {"attention": "Attention", "experts": "Experts", "lens": "Logit lens"}
NO_SCRIPT = "Maps and coloured texts are drawn by this page's script, which is off."
MOST_PAIRS = 1_000_000  # cells of the tables of experts' shared tokens, in all layers: two or three bytes each
PAGE_DIGITS = 4  # of probabilities; --json has more

ATTENTION_HELP = (
    "Each map: a row for each query (the first on top), a column for each key; a cell's colour is as strong as the "
    "root of its weight, and strongest in the map's highest hundredth. Choose a query in a map or in the text, and "
    "the text shows where the head looks from there."
)
EXPERTS_HELP = (
    "Under each token the experts that the layer's router chose, the one with the largest weight first, which gives "
    "the colour."
)
LENS_HELP = (
    "The residual stream after each layer, sent through the model's final norm and head: what the model would predict "
    "if it ended there. The map shows the probability of the text's next token, the last layer on top; choose a place "
    "in it or in the text."
)


def render(report: Mapping[str, Any], made: str) -> str:
    """The page as HTML text; ``made`` is the time that it names."""
    title = text(f"{report['run']}, step {report['step']}")
    script = one_script(SCRIPTS)
    style = "\n".join(file.read_text(encoding="utf-8") for file in STYLES)
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title} - Roundtable inspect</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{style}</style></head><body>",
        f"<header><h1>{title}</h1>",
        f"<p class=remark>{text(headline(report))}; {text(report['checkpoint'])}. Made {text(made)} by "
        f"<code>roundtable inspect</code>.</p>{navigation(report)}</header>",
        "<main>",
        *body(report),
        "</main>",
        f'<script type="application/json" id="data">{payload(report)}</script>',
        f"<script>{script}</script></body></html>\n",
    ]
    return "\n".join(parts)


def navigation(report: Mapping[str, Any]) -> str:
    """HTML of the links to the page's sections."""
    links = (f'<a href="#{part}">{TITLES[part]}</a>' for part in report["parts"])
    return f'<nav aria-label="sections">{"".join(links)}</nav>'


def body(report: Mapping[str, Any]) -> Iterator[str]:
    """HTML of the page's sections, in order."""
    lines = [f'<li class="{"good" if is_so else "bad"}">{text(line)}</li>' for is_so, line in check_lines(report)]
    lines += [f"<li>{text(in_a_line(note))}</li>" for note in report["notes"]]
    yield f'<ul class="checks">{"".join(lines)}</ul>'
    yield f'<noscript><p class="notes">{text(NO_SCRIPT)}</p></noscript>'
    yield '<div id="toolbar" role="toolbar" aria-label="text"></div>'
    if "attention" in report["parts"]:
        yield heading("attention", ATTENTION_HELP)
        yield from tables(report, "attention", HEAD_TITLES, head_rows, "where heads look, means over the queries")
    if "experts" in report["parts"]:
        yield heading("experts", EXPERTS_HELP)
        yield f'<p class="remark">The maps and the table are made of {text(in_a_line(experts_of(report)))}.</p>'
        yield '<div class="grid" id="experts-maps"></div>'
        yield table("layers in numbers", EXPERT_TITLES, expert_rows(report["experts"]), is_open=True)
    if "lens" in report["parts"]:
        yield heading("lens", LENS_HELP)
        yield from tables(report, "lens", LENS_TITLES, lens_rows, "layers in numbers, means over the text")


def heading(part: str, told: str) -> str:
    """HTML of a section's title and explanation, and of the element in which the script draws."""
    return f'<h2 id="{part}">{TITLES[part]}</h2><p class="remark">{text(told)}</p><div id="draw-{part}"></div>'


def tables(report: Mapping[str, Any], key: str, titles: Sequence[str], rows: Any, told: str) -> Iterator[str]:
    """HTML of a table for each text that has this part."""
    for each in report["texts"]:
        if key in each:
            name = f"{in_a_line(each['name'])} ({counted(len(each['tokens']), 'token')}): {told}"
            yield table(name, titles, rows(each))


def table(name: str, titles: Sequence[str], rows: Sequence[Sequence[str]], *, is_open: bool = False) -> str:
    """HTML of a table that can be folded, and scrolls within itself where it is too wide."""
    head = "".join(f"<th scope=col>{text(each)}</th>" for each in titles)
    lines = "".join(f"<tr>{''.join(f'<td>{text(in_a_line(each))}</td>' for each in row)}</tr>" for row in rows)
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    opened = " open" if is_open else ""
    return f'<details{opened}><summary>{text(name)}</summary><div class="scroll" tabindex="0">{inner}</div></details>'


def payload(report: Mapping[str, Any]) -> str:
    """The data that the script draws, as JSON that cannot close its script element; texts in it are escaped."""
    words: dict[str, int] = {}
    tree: dict[str, Any] = {
        "texts": [drawn_text(each, words) for each in report["texts"]],
        "experts": drawn_experts(report["experts"]) if "experts" in report else None,
    }
    tree["words"] = list(words)
    return json.dumps(shown(tree), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def drawn_experts(experts: Mapping[str, Any]) -> dict[str, Any]:
    """The experts' part of the data, with pairs only for as many layers, evenly spaced, as the page has room for."""
    layers = experts["layers"]
    with_pairs = spread(len(layers), max(1, MOST_PAIRS // experts["n_experts"] ** 2))
    kept = [
        layer if place in with_pairs else {key: value for key, value in layer.items() if key != "pairs"}
        for place, layer in enumerate(layers)
    ]
    return {**experts, "layers": kept}


def drawn_text(each: Mapping[str, Any], words: dict[str, int]) -> dict[str, Any]:
    """One text's part of the data. Tokens' texts become numbers in ``words``, to which new ones are added."""
    tree: dict[str, Any] = {
        "name": in_a_line(each["name"]),
        "tokens": [number_of(token, words) for token in each["token_texts"]],
        "ids": each["tokens"],
    }
    if "attention" in each:
        tree["attention"] = [drawn_layer(layer) for layer in each["attention"]]
    if "routing" in each:
        layers = each["routing"]
        tree["routing"] = [{**layer, "weights": brief(layer["weights"])} for layer in layers]
    if "lens" in each:
        tree["lens"] = [drawn_lens(row, words) for row in each["lens"]]
    return tree


def drawn_layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    """One layer's maps: a byte for each weight's square root, row by row, without the keys after a query."""
    heads = []
    for head in layer["heads"]:
        flat = np.array([weight for row in head["weights"] for weight in row], np.float64)
        heads.append({"head": head["head"], "codes": packed(part_codes(np.sqrt(flat)))})
        if "sinks" in head:
            heads[-1]["sinks"] = brief(head["sinks"])
    return {"layer": layer["layer"], "window": layer["window"], "right": layer["right"], "heads": heads}


def drawn_lens(row: Mapping[str, Any], words: dict[str, int]) -> dict[str, Any]:
    """One layer's row of the logit lens for the script."""
    return {
        "layer": row["layer"],
        "top": [[number_of(token, words) for token in top_K] for top_K in row["top_texts"]],
        "p": brief(row["top_probabilities"]),
        "rank": row["next_rank"],
        "next": brief(row["next_probability"]),
    }


def number_of(token: str, words: dict[str, int]) -> int:
    """The number in ``words`` of a token's text in one line; one of spaces alone, or empty, is shown by symbols."""
    line = in_a_line(token)
    return words.setdefault(line if line.strip(" ") else "␣" * len(line) or "∅", len(words))


def brief(values: Any) -> Any:
    """Numbers, in nested lists, with PAGE_DIGITS digits; None for a text that stands for NaN or infinity."""
    if isinstance(values, list):
        return [brief(each) for each in values]
    return None if isinstance(values, str) else float(f"{values:.{PAGE_DIGITS}g}")
