"""`roundtable eval --tasks`: scores of a checkpoint on tasks of lm-evaluation-harness, by one process."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from data.errors import reason_of
from data.places import why_no_path, why_not_writable
from launcher.commands.trained import (
    Trained,
    bos_id,
    end_ids,
    load_as_it_trains,
    load_tokenizer,
    open_trained,
    refusing_spoiled_weights,
)
from launcher.console import in_a_line, open_console, say, tell, text_column
from launcher.errors import UserError
from launcher.tables import plain_table, wide_console
from launcher.tasks.generation import generate_all
from launcher.tasks.load import Asked, check_asked, load_tasks
from launcher.tasks.results import Requests, build_requests, results_of
from launcher.tasks.score import Answer, score
from launcher.tasks.windows import Window, padded_rows
from modeling.decoder import Decoder
from modeling.families.rope_json import longest
from parallel.batch import MicroBatch
from parallel.mesh import lone_mesh
from parallel.processes.stop import undoing

KEY = "--tasks"
BATCH_TOKENS = 8192  # in one forward pass, padding included; a single sequence may have more
BATCH_TEXTS = 16  # texts that are generated together


@undoing()
def evaluate_tasks(path: Path | str, asked: Asked, out: str | None, *, as_json: bool) -> int:
    """Prints the checkpoint's metrics on the tasks, and writes them to ``out`` as JSON, if given; returns 0.

    Computes in the precision that the run trains in, like held-out losses. Raises UserError where a task, the
    checkpoint or an option is wrong; then nothing is written.
    """
    problems = option_problems(asked, out)
    if problems:
        raise UserError(problems)
    check_asked(asked)
    trained = open_trained(path)
    if trained.tokenizer is None:
        problem = f"CHECKPOINT={path} holds no tokenizer, so no task can be read"
        raise UserError([f"{problem}; leave out {KEY}, or set data.tokenizer and train on"])
    tokenizer = load_tokenizer(trained)
    requests = build_requests(load_tasks(asked), asked)
    found = {"step": trained.checkpoint.step} | answered(trained, tokenizer, requests)
    if as_json:
        say(json.dumps(found))
    else:
        print_results(found)
    if out is not None:
        try:
            Path(out).write_text(json.dumps(found, indent=2) + "\n")
        except OSError as error:
            raise UserError([f"--out={out} cannot be written ({reason_of(error)}); choose another place"]) from None
    return 0


def option_problems(asked: Asked, out: str | None) -> list[str]:
    """What is wrong with the options, one line each."""
    problems = []
    if asked.limit is not None and asked.limit < 1:
        problems.append(f"--limit={asked.limit} must be at least 1; leave it out for all documents")
    if asked.shots is not None and not 0 <= asked.shots <= 1000:
        problems.append(f"--shots={asked.shots} must lie between 0 and 1000; leave it out for what each task says")
    if not 0 <= asked.seed < 2**63:
        problems.append(f"--seed={asked.seed} must lie between 0 and 2^63 - 1; try 0")
    rule = None if out is None else why_not_new(out)
    if rule is not None:
        problems.append(f"--out={out} {rule}; give the path of a new file")
    return problems


def why_not_new(out: str) -> str | None:
    """Why no new file can be written at ``out``; None where one can. Checked before the model computes."""
    rule = why_no_path(out)
    if rule is not None:
        return rule
    if os.path.lexists(out):
        return "is there already"
    folder = os.path.dirname(out) or "."
    return why_not_writable(folder) if os.path.isdir(folder) else "must lie in a folder that exists"


def answered(trained: Trained, tokenizer: Any, requests: Requests) -> dict[str, Any]:
    """The results of the tasks from the model's answers, its longest sequence, and how many requests were cut to it."""
    from launcher.tasks.model import RoundtableLM

    config = trained.config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = load_as_it_trains(trained, device)
    max_length = longest(config.model, config.data.seq_len)
    ends = end_ids(trained, tokenizer)

    def scored(windows: Sequence[Window]) -> list[Answer]:
        with shown_progress("tokens scored", sum(window.n_inputs for window in windows)) as advance:
            return score_windows(decoder, windows, device, advance)

    def generated(wanted: Sequence[Any]) -> list[str]:
        with refusing_spoiled_weights(trained), shown_progress("texts generated", len(wanted)) as advance:
            return generate_all(decoder, tokenizer, wanted, BATCH_TEXTS, requests.asked.seed, advance, ends)

    model = RoundtableLM(tokenizer, max_length, scored, generated, bos_id(trained))
    answers: dict[int, Any] = {}
    for kind in requests.kinds:
        instances = requests.of_kind(kind)
        answers |= zip(map(id, instances), getattr(model, kind)(instances), strict=True)
    return {**results_of(requests, answers), "max_length": max_length, "n_cut": model.n_cut}


def score_windows(
    decoder: Decoder, windows: Sequence[Window], device: torch.device, advance: Callable[[int], None] = lambda n: None
) -> list[Answer]:
    """Each window's answer, in order. Batches hold windows of similar length, at most BATCH_TOKENS, longest first."""
    order = sorted(range(len(windows)), key=lambda number: -windows[number].n_inputs)
    found: dict[int, Answer] = {}

    def run(batches: list[MicroBatch]) -> Iterator[Any]:
        return (decoder(batch.tokens_BS, batch.context, batch.targets_BS) for batch in batches)

    while order:
        size = max(1, BATCH_TOKENS // windows[order[0]].n_inputs)
        own, order = order[:size], order[size:]
        batch = [windows[number] for number in own]
        answers = score(run, decoder.head, batch, padded_rows(batch), len(batch), lone_mesh(device))
        assert answers is not None
        found |= zip(own, answers, strict=True)
        advance(sum(window.n_inputs for window in batch))
    return [found[number] for number in range(len(windows))]


@contextmanager
def shown_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how much more is done, and shows a bar on a terminal, nothing elsewhere."""
    console = open_console(stderr=True)
    if not console.is_terminal:
        yield lambda n: None
        return
    with Progress(text_column(what), BarColumn(), MofNCompleteColumn(), console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda n: progress.advance(task, n)


def print_results(found: dict[str, Any]) -> None:
    """Prints a table of the metrics, a line on the harness and the options, and one on requests that were cut."""
    table = plain_table("task", "version", ">documents", ">shots", "metric", ">value", ">stderr")
    for kind in ("tasks", "groups"):
        for name, result in found.get(kind, {}).items():
            about = [name, str(result.get("version") or ""), str(result["documents"]), str(result.get("shots", ""))]
            for metric, numbers in result["metrics"].items():
                table.add_row(
                    *map(in_a_line, about), in_a_line(metric), shown(numbers["value"]), shown(numbers["stderr"])
                )
                about = [""] * len(about)
    wide_console().print(table)
    limit = "" if found["limit"] is None else f", the first {found['limit']} documents of each"
    say(f"step {found['step']}: lm-eval {found['lm_eval']}, seed {found['seed']}{limit}")
    if found["n_cut"]:
        told = f"longer than the model's {found['max_length']} tokens"
        tell(f"{found['n_cut']} requests were {told}; their first tokens were left out")


def shown(value: float | None) -> str:
    """A number with four decimals; an empty text for None."""
    return "" if value is None else f"{value:.4f}"
