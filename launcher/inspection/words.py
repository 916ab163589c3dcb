"""The findings in words and table rows, for both the terminal and the page."""

from collections.abc import Mapping
from typing import Any

from launcher.replay.show import as_number

FEW = 4  # sources or experts that a cell lists


def headline(report: Mapping[str, Any]) -> str:
    """A line that says which model and texts were looked at."""
    model = f"{report['family']}, {counted(report['n_layers'], 'layer')} of {counted(report['n_heads'], 'head')}"
    return f"{report['run']}, step {report['step']}: {model}, in {report['dtype']} on a {report['device'].upper()}"


def check_lines(report: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """A pair for each check that was made: whether it passed, and a sentence on it."""
    found = []
    attention = report["checks"].get("attention")
    if attention is not None:
        error, bound = (shown(attention[key]) for key in ("output_error", "output_tolerance"))
        sums = f"each query's sum to one, to {shown(attention['sum_error'])}"
        if report["has_sinks"]:
            sums = "a query's sum to one less what its sink takes"
        if attention["right"]:
            line = f"attention: weights times values make each layer's own output to {error} (bound {bound}); {sums}"
        else:
            line = (
                f"attention: these are NOT the model's weights: times values they miss a layer's output by {error} "
                f"(bound {bound}), their sums one by {shown(attention['sum_error'])}"
            )
        found.append((attention["right"], line))
    lens = report["checks"].get("lens")
    if lens is not None:
        is_exact = lens["last_layer_is_the_output"]
        said = "the last layer's logits are the model's, bit for bit"
        found.append((is_exact, f"lens: {said if is_exact else 'the last layer does NOT give those of the model'}"))
    return found


def head_rows(text: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Table rows on where each head of each layer looks; see HEAD_TITLES."""
    rows = []
    for layer in text["attention"]:
        window = "all" if layer["window"] is None else str(layer["window"])
        for head in layer["heads"]:
            parts = [percent(head[key]) for key in ("first", "previous", "itself")]
            sink = "-" if head["sink"] is None else percent(head["sink"])
            rows.append((str(layer["layer"]), str(head["head"]), window, *parts, shown(head["distance"]), sink))
    return rows


HEAD_TITLES = ("layer", "head", "window", "first token", "token before", "itself", "mean distance", "sink")


def layer_rows(text: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Table rows on each layer's heads: how far they look, and which looks most at the first and the previous token."""
    rows = []
    for layer in text["attention"]:
        heads = layer["heads"]
        window = "all" if layer["window"] is None else str(layer["window"])
        distances = [head["distance"] for head in heads]
        far = " to ".join(
            dict.fromkeys(shown(each) for each in (min(distances, key=as_number), max(distances, key=as_number)))
        )
        most = [max(heads, key=lambda head, key=key: as_number(head[key])) for key in ("first", "previous")]
        told = (
            f"{percent(head[key])} (head {head['head']})" for head, key in zip(most, ("first", "previous"), strict=True)
        )
        sinks = [head["sink"] for head in heads if head["sink"] is not None]
        rows.append((str(layer["layer"]), window, far, *told, percent(max(sinks, key=as_number)) if sinks else "-"))
    return rows


LAYER_TITLES = ("layer", "window", "mean distance", "most on the first token", "on the one before", "on a sink")


def expert_rows(experts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Table rows on each layer's experts: the busiest, idle ones, the strongest pair, and how sources differ."""
    rows = []
    for layer in experts["layers"]:
        total = max(1, sum(layer["counts"]))
        busiest = sorted(range(len(layer["counts"])), key=lambda expert: -layer["counts"][expert])[:FEW]
        loads = ", ".join(f"{each} ({percent(layer['counts'][each] / total)})" for each in busiest)
        idle = sum(count == 0 for count in layer["counts"])
        pair = layer["strongest_pair"]
        told = "-"
        if pair is not None:
            one, other = pair["experts"]
            told = f"{one} + {other}: {pair['tokens']} tokens ({pair['by_chance']:.0f} by chance)"
        bits = "-"
        if "specialisation_bits" in layer:
            bits = f"{layer['specialisation_bits']:.3f} ({layer['by_chance_bits']:.3f} by chance)"
        rows.append((str(layer["layer"]), loads, str(idle), told, bits))
    return rows


EXPERT_TITLES = ("layer", "busiest experts (share)", "idle", "most often together", "bits about the source")


def lens_rows(text: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Table rows on how well each layer would predict the next tokens; see LENS_TITLES."""
    rows = []
    for row in text["lens"]:
        name = "embedding" if row["layer"] is None else str(row["layer"])
        right = "-" if row["first_is_right"] is None else percent(row["first_is_right"])
        loss = "-" if row["loss"] is None else shown(row["loss"])
        rank = "-" if row["median_rank"] is None else f"{row['median_rank']:,.0f}"
        rows.append((name, loss, right, rank))
    return rows


LENS_TITLES = ("after layer", "loss (nats)", "likeliest is right", "median rank of the next token")


def experts_of(report: Mapping[str, Any]) -> str:
    """The tokens from which the experts' tables were made, in words."""
    experts = report["experts"]
    counts = ", ".join(f"{name} {counted(n, 'token')}" for name, n in experts["tokens"].items())
    if experts["of_heldout"]:
        most = counted(report["sequences"], "sequence")
        return f"held-out text of the run's sources, {most} of each at most: {counts}"
    return f"the {'texts' if len(experts['tokens']) > 1 else 'text'}: {counts}"


def next_of(text: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The likeliest tokens after the text's end, with their probabilities."""
    last = text["lens"][-1]
    return list(zip(last["top_texts"][-1], last["top_probabilities"][-1], strict=True))


def counted(number: int, noun: str) -> str:
    """The number with its noun: "1 token", "1,024 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(part: Any) -> str:
    """A share as text, as "12%"; a text such as "NaN" is returned as it is."""
    return f"{100 * part:.0f}%" if isinstance(part, int | float) else str(part)


def shown(value: Any) -> str:
    """A number as text, a float with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
