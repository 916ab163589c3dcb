"""The report on a blamed step: a tree for JSON, from which the terminal's tables are printed."""

from collections.abc import Callable, Sequence
from typing import Any

from launcher.blame.rank import Blamed, DocumentBlamed, blame_of, grad_norm_without, loss_without
from launcher.console import in_a_line, say
from launcher.replay.compare import StepVerdict
from launcher.replay.plan import Plan
from launcher.replay.report import as_json
from launcher.replay.show import print_table, print_verdict

TEXT_TOKENS = 24  # tokens of a document's text that are shown beside its name


def build_report(
    plan: Plan,
    verdicts: Sequence[StepVerdict],
    blamed: Blamed,
    texts: dict[str, str],
    text_of: Callable[[int], str] | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """The whole report, fit for JSON. ``texts``: a beginning by document; ``text_of``: None without a tokenizer."""
    first = next((each for verdict in verdicts for each in verdict.differences), None)
    square, auxiliary = blamed.whole.dot, blamed.auxiliary
    rows = [document_row(each, blamed, texts.get(each.document.name)) for each in blamed.documents]
    parts = [each.measured.dot for each in blamed.documents] + ([auxiliary.dot] if auxiliary is not None else [])
    return as_json(
        {
            "run": plan.run_path,
            "step": plan.step,
            "from": plan.begins_at,
            "ranks": plan.n_ranks,
            "reproduced": first is None,
            "first_difference": vars(first) if first is not None else None,
            "notes": list(notes),
            "steps": [verdict.as_json() for verdict in verdicts],
            "grad_norm": blamed.whole.grad_norm,
            "loss": blamed.whole.loss / max(1, sum(each.n_targets for each in blamed.documents)),
            "documents": rows,
            "auxiliary_share": auxiliary.share_of(square) if auxiliary is not None else None,
            "sum_of_shares": sum(parts) / square if square else float("nan"),
            "tokens": [
                {
                    "document": each.document,
                    "sample": each.sample,
                    "position": each.position,
                    "token": each.token,
                    "before": each.before,
                    **({"text": text_of(each.token), "text_before": text_of(each.before)} if text_of else {}),
                    "loss": each.measured.loss,
                    "share": each.measured.share_of(square),
                }
                for each in blamed.tokens
            ],
        }
    )


def document_row(each: DocumentBlamed, blamed: Blamed, text: str | None) -> dict[str, Any]:
    """A document's row of the report; ranges are half-open."""
    measured = each.measured
    all_of_it = blamed.whole, sum(every.n_targets for every in blamed.documents)
    return {
        "document": each.document.name,
        "tokens": list(each.document.tokens),
        "parts": [part._asdict() for part in each.document.parts],
        "targets": each.n_targets,
        "loss": measured.loss / max(1, each.n_targets),
        "loss_share": measured.loss / blamed.whole.loss if blamed.whole.loss else float("nan"),
        "share": measured.share_of(blamed.whole.dot),
        "blame": blame_of(each, *all_of_it),
        "loss_without": loss_without(each, *all_of_it),
        "grad_norm_without": grad_norm_without(each, *all_of_it),
        "grad_norm": measured.grad_norm,
        **({"text": text} if text is not None else {}),
    }


def print_report(report: dict[str, Any]) -> None:
    """Prints whether the step was reproduced, then a table of its documents and one of the worst tokens."""
    begin = f"checkpoint step {report['from']}" if report["from"] else "the initial weights"
    say(in_a_line(f"{report['run']}, step {report['step']}, executed from {begin} on"))
    print_verdict(report)
    say(f"loss {shown(report['loss'])}, gradient norm {shown(report['grad_norm'])}")
    has_text = any("text" in row for row in report["documents"])
    keys = (
        "blame",
        "loss_without",
        "grad_norm_without",
        "share",
        "loss_share",
        "loss",
        "targets",
        "document",
        *(("text",) if has_text else ()),
    )
    print_table(
        "documents, by how much less the loss or the gradient norm would be without them", keys, report["documents"]
    )
    auxiliary = report["auxiliary_share"]
    routers = "" if auxiliary is None else f", including {shown(auxiliary)} of the routers' auxiliary losses"
    say(f"all shares sum to {shown(report['sum_of_shares'], 8)}{routers}")
    texts = ("text_before", "text") if any("text" in row for row in report["tokens"]) else ()
    keys = ("loss", "share", "token", "before", *texts, "document", "position")
    print_table("the first documents' tokens of the highest loss", keys, report["tokens"], most=None)


def shown(value: float | str, digits: int = 4) -> str:
    """A number with so many digits, or the text that stands for one that is not finite."""
    return value if isinstance(value, str) else f"{value:.{digits}g}"
