"""Writes the step's documents, tokens coloured by loss, as one self-contained HTML page; their text is escaped."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.html_text import text
from launcher.replay.report import DocumentSeen
from launcher.replay.show import SHADES, shade_of

# No script runs and nothing is fetched, even where a document contains HTML.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = "body{font:15px/1.6 sans-serif;margin:2em;max-width:60em}p{white-space:pre-wrap;overflow-wrap:anywhere}"


def write_page(
    path: Path, report: Mapping[str, Any], documents: Sequence[DocumentSeen], text_of: Callable[[int], str] | None
) -> None:
    """Writes the page to ``path``, in UTF-8. ``text_of`` decodes a token's id; None: ids are shown."""
    title = text(f"{report['run']}, step {report['step']}")
    scale = " ".join(f'<span style="background:{shade}">{least:g}</span>' for least, shade in SHADES)
    lines = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style></head><body>',
        f"<h1>{title}</h1><p>Each token's loss, in nats from {scale} on</p>",
    ]
    for document in documents:
        losses = document.losses
        mean = f"{sum(losses) / len(losses):.4f}" if losses else "-"
        lines.append(f"<h2>{text(document.source)} {document.document}</h2>")
        lines.append(f"<div>{text(document.file)}: {len(losses)} tokens, loss {mean}</div>")
        for part in document.parts:
            spans = [span(token, loss, text_of) for token, loss in zip(part.tokens, [None, *part.losses], strict=True)]
            lines.append(f"<p>{''.join(spans)}</p>")
    lines.append("</body></html>\n")
    path.write_text("\n".join(lines), encoding="utf-8")


def span(token: int, loss: float | None, text_of: Callable[[int], str] | None) -> str:
    """HTML of one token on a background by its loss; ``loss`` is None for a part's first token, not predicted."""
    shade = shade_of(loss) if loss is not None else None
    style = f' style="background:{shade}"' if shade is not None else ""
    told = f' title="{token}: {loss:.3f}"' if loss is not None else ""
    return f"<span{style}{told}>{text(f'{token} ' if text_of is None else text_of(token))}</span>"
