"""A dry run printed as text, from its JSON alone."""

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from launcher.console import in_a_line
from launcher.plan.memory import REDUCTION_BYTES
from launcher.tables import plain_table, size_text, wide_console

PARTS = ("weights", "masters", "optimizer", "gradients", "total")


def print_report(found: dict[str, Any]) -> None:
    """Prints the checks, then the run's sizes; only the checks where the config is refused."""
    console = wide_console()
    table = plain_table("check", "")
    for check in found["checks"]:
        mark = Text("problem", "bold red") if check["problems"] else Text("ok", "green")
        table.add_row(check["name"], mark)
    console.print(table)
    if "model" in found:
        console.print()
        facts = plain_table("", "")
        facts.show_header = False
        for name, value in fact_rows(found):
            facts.add_row(name, Text(in_a_line(value)))
        console.print(facts)
        if found["data"] is not None:
            print_data(console, found["data"])
        print_memory(console, found)
    verdict = "\nThe run can start." if found["can_start"] else "\nThe run cannot start until the problems are mended:"
    console.print(verdict)


def fact_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts that take one line each, as pairs of name and text."""
    model, layout, data = found["model"], found["layout"], found["data"]
    yield "run directory", found["run_dir"]
    yield "begins", resume_words(found["resume"])
    active = f", {model['active_parameters']:,} active for a token"
    yield "parameters", f"{model['parameters']:,}{active if model['active_parameters'] < model['parameters'] else ''}"
    yield "FLOPs", f"{model['flops_per_token']:.3g} a token, forward and backward"
    yield "layout", layout_words(layout)
    yield "recomputed", f"by layer: {layout['recompute']}"
    if data is not None:
        yield "tokens", token_words(data)
    yield "checkpoints", disk_words(found["disk"])


def token_words(data: dict[str, Any]) -> str:
    """The run's tokens and steps in words; those from before a change of the batch size are named separately."""
    if "before" not in data:
        return f"{data['tokens']:,} in {data['steps']:,} steps of {data['tokens_per_step']:,}{ramp_words(data)}"
    before, words = data["before"], f"{data['tokens']:,} in {data['steps']:,} steps"
    words = f"{words}, {before['tokens']:,} of them in the first {before['steps']:,}, with other batches"
    return f"{words}; then steps of {data['tokens_per_step']:,}{ramp_words(data)}"


def ramp_words(data: dict[str, Any]) -> str:
    """How the batch size grows, in words; empty where it does not."""
    if "ramp" not in data:
        return ""
    ramp = data["ramp"]
    smaller = f"smaller ones for {ramp['steps']:,} steps, {ramp['tokens']:,} tokens"
    return f"; the first of {ramp['tokens_per_step']:,}, and {smaller}"


def resume_words(resume: dict[str, Any] | None) -> str:
    """The step at which the run would begin or go on, in words."""
    if resume is None:
        return "not known: the checkpoints cannot be listed"
    damaged = f" (damaged: {', '.join(resume['damaged'])})" if resume["damaged"] else ""
    if not resume["step"]:
        return f"at step 0: there is no checkpoint to go on from{damaged}"
    if resume["step"] >= resume["steps"]:
        return f"no step is left: the run is finished, at step {resume['step']} of {resume['steps']}{damaged}"
    return f"after step {resume['step']} of {resume['steps']}, whose checkpoint has all its files{damaged}"


def layout_words(layout: dict[str, Any]) -> str:
    """The mesh's degrees, those of the experts' mesh if it is another, the ZeRO stage and micro-batches, in words."""
    axes = " x ".join(f"{axis} {layout[axis]}" for axis in ("pp", "dp", "cp", "tp"))
    own = f"; experts: ep {layout['ep']} x edp {layout['edp']} (edp: replicas of each expert)"
    experts = own if layout["ep"] > 1 else ""
    ranks, batches = layout["ranks"], layout["micro_batches_per_rank"]
    words = f"{ranks} process{'es' if ranks > 1 else ''} = {axes}{experts}; ZeRO {layout['zero']}; "
    return f"{words}{batches} micro-batch{'es' if batches > 1 else ''} a step on each"


def disk_words(disk: dict[str, Any]) -> str:
    """A checkpoint's size, how many may exist at once, and the room for them, in words."""
    one = f"{size_text(disk['checkpoint_bytes'])} each in {disk['checkpoints']}"
    if disk["free_bytes"] is None:
        return one
    needed, free = size_text(disk["needed_bytes"]), size_text(disk["free_bytes"])
    return f"{one}; at most {disk['most_at_once']} at once, one being written, so {needed} more of {free} free"


def print_data(console: Any, data: dict[str, Any]) -> None:
    """Prints each source with its epochs or, if token files are missing, what has to be prepared first."""
    if not data["prepared"]:
        table = plain_table("to be prepared first", ">files", ">text", ">shards")
        for row in data["to_prepare"]:
            text = size_text(row["text_bytes"]) if row["text_bytes"] is not None else "not known yet"
            amounts = ("" if row[key] is None else f"{row[key]:,}" for key in ("files", "shards"))
            files, shards = amounts
            table.add_row(Text(in_a_line(row["path"])), files, text, shards)
        if not data["to_prepare"]:
            table.add_row("the tokenizer", "", "", "")
    else:
        table = plain_table("source", ">share", ">samples", ">steps to an epoch", ">epochs")
        for row in data["sources"]:
            to_an_epoch = row["steps_to_an_epoch"]
            steps = f"{to_an_epoch:,.1f}" if to_an_epoch is not None else "never"
            numbers = (f"{row['samples']:,}", steps, f"{row['epochs']:.3g}")
            table.add_row(Text(in_a_line(row["path"])), f"{row['share']:.1%}", *numbers)
    console.print()
    console.print(table)


def print_memory(console: Any, found: dict[str, Any]) -> None:
    """Prints the memory of each pipeline position's ranks by part, one line each."""
    table = plain_table("rank", "holds", *(f">{part}" for part in PARTS))
    for row in found["memory"]:
        first, last = row["ranks"]
        ranks = f"{first}" if first == last else f"{first}-{last}, each"
        table.add_row(ranks, row["holds"], *(size_text(row[f"{part}_bytes"]) for part in PARTS))
    console.print()
    console.print(table)
    console.print(
        "Not counted: activations, one micro-batch's gradients in 16 bits, weights that ZeRO 3 gathers for a "
        f"while, and buffers of communication (the largest, for gradients, takes up to {size_text(REDUCTION_BYTES)}).",
        style="dim",
    )
