"""Tasks of lm-evaluation-harness, evaluated during training under the run's own parallel layout.

Rank 0 makes the requests once, at the start; all ranks then hold them as rows of data.seq_len tokens, which pass
through the model like held-out samples. Such passes cannot generate text, so tasks that generate are refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from data.tokenizer import load_tokenizer
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.tasks.load import Asked, check_asked, load_tasks
from launcher.tasks.own import is_own
from launcher.tasks.results import Requests, build_requests, results_of
from launcher.tasks.score import Answer, score
from launcher.tasks.windows import Rows, Window, packed_rows
from modeling.decoder import Output
from parallel.batch import MicroBatch
from parallel.mesh import Mesh
from parallel.zero.engine import Engine

KEY = "train.eval_tasks"


@dataclass(frozen=True)
class Prepared:
    """The tasks' requests, and the windows of tokens that are scored to answer them, in the requests' order."""

    requests: Requests
    instances: list[Any]
    counts: list[int]  # how many of ``windows`` belong to each of ``instances``
    windows: list[Window]
    n_cut: int  # requests longer than data.seq_len, whose first tokens are left out

    def row(self, answers: Sequence[Answer]) -> dict[str, float]:
        """``eval/TASK/METRIC`` -> value, from the answers to all windows; metrics without a value are left out."""
        from launcher.tasks.model import answer_of

        found, start = {}, 0
        for instance, count in zip(self.instances, self.counts, strict=True):
            found[id(instance)] = answer_of(instance, answers[start : start + count])
            start += count
        results = results_of(self.requests, found, with_errors=False)
        everything = {**results["tasks"], **results.get("groups", {})}
        return {
            f"eval/{name}/{metric}": numbers["value"]
            for name, result in everything.items()
            for metric, numbers in result["metrics"].items()
            if numbers["value"] is not None
        }


def asked_by(config: RunConfig) -> Asked:
    """The tasks and the limit on their examples that the config sets."""
    return Asked(config.train.eval_tasks, KEY, limit=config.train.eval_tasks_limit)


def check_task_files(config: RunConfig) -> None:
    """Checks train.eval_tasks without a tokenizer, by making the requests of the user's own tasks. Raises UserError."""
    if not config.train.eval_tasks:
        return
    asked = asked_by(config)
    check_asked(asked)
    own = replace(asked, specs=tuple(filter(is_own, asked.specs)))
    if own.specs:
        requests_of(own)


def check_tasks(config: RunConfig) -> None:
    """Checks train.eval_tasks in full but for the model: prepares the tasks and computes metrics from made-up answers.

    Raises UserError, also where there is no tokenizer.
    """
    if config.train.eval_tasks:
        prepared = prepare_tasks(config)
        prepared.row([Answer(-1.0 * window.n_scored, False) for window in prepared.windows])


def check_kind(name: str, kind: str | None) -> None:
    """Raises UserError for a task whose output type generates text."""
    if kind == "generate_until":
        rule = "generates text (output_type: generate_until), which no evaluation in training does"
        raise UserError([f"{KEY}: {name} {rule}; leave it to `roundtable eval --tasks`"])


def requests_of(asked: Asked) -> Requests:
    """The tasks' requests as text. Raises UserError where a task generates text, or its requests cannot be made."""
    loaded = load_tasks(asked)
    for name, task in loaded.tasks.items():
        check_kind(name, task.OUTPUT_TYPE)
    return build_requests(loaded, asked)


def prepare_tasks(config: RunConfig) -> Prepared:
    """The tasks' requests with their tokenized windows. Raises UserError without a tokenizer, or for a bad task."""
    from launcher.tasks.model import RoundtableLM

    asked = asked_by(config)
    requests = requests_of(asked)
    tokenizer = load_tokenizer(config.data, config.model.vocab_size)
    if tokenizer is None:
        raise UserError([f"{KEY} needs a tokenizer, and data.tokenizer=null; set data.tokenizer"])
    begin = tokenizer.bos_token_id if config.data.add_bos else None
    assert begin is None or isinstance(begin, int), "one token begins a text"
    reader = RoundtableLM(tokenizer, config.data.seq_len, unscored, begin=begin)
    instances = [instance for own in requests.instances.values() for instance in own]
    windows = [reader.windows_of(instance) for instance in instances]
    flat = [window for own in windows for window in own]
    return Prepared(requests, instances, [len(own) for own in windows], flat, reader.n_cut)


def unscored(_: Sequence[Window]) -> list[Answer]:
    """A stand-in for the model's scoring function, which must not be called: only the requests are tokenized here."""
    raise AssertionError("the ranks score them together")


class LiveTasks:
    """A run's tasks on one rank: every rank holds the windows, and only rank 0 ``prepared``, which has the requests."""

    def __init__(self, config: RunConfig, windows: list[Window], prepared: Prepared | None) -> None:
        self.train = config.train
        self.windows, self.prepared = windows, prepared
        self.rows: Rows = packed_rows(windows, config.data.seq_len)

    def is_due(self, step: int) -> bool:
        """Whether the tasks are evaluated after this step: after the last one, and every train.eval_tasks_every_steps.

        Where that is null, train.eval_every_steps counts.
        """
        every = self.train.eval_tasks_every_steps or self.train.eval_every_steps
        return step == self.train.steps or (every is not None and step % every == 0)

    def event(self, step: int) -> Mapping[str, Any]:
        """The event "eval_tasks" of the start, on rank 0: the tasks and how much is scored; {} on other ranks."""
        prepared = self.prepared
        if prepared is None:
            return {}
        about = {"requests": len(prepared.instances), "sequences": len(self.rows.tokens_RS), "cut": prepared.n_cut}
        return {"step": step, "event": "eval_tasks", "tasks": [*prepared.requests.instances], **about}

    def evaluate(self, engine: Engine, step: int, alive: Callable[[], None]) -> dict[str, Any]:
        """Evaluates the tasks; returns the event "evaluated_tasks" on rank 0, {} elsewhere. All ranks call it.

        ``alive`` is called after each micro-batch.
        """

        def run(micro_batches: list[MicroBatch]) -> Iterator[Output]:
            for output in engine.evaluate(micro_batches):
                alive()
                yield output

        head, size = engine.model.head, self.train.micro_batch_size
        answers = score(run, head, self.windows, self.rows, size, engine.mesh)
        if answers is None or self.prepared is None:
            return {}
        return {"step": step, "event": "evaluated_tasks", **self.prepared.row(answers)}


def open_tasks(config: RunConfig, mesh: Mesh) -> LiveTasks | None:
    """The run's tasks; None where it has none. All ranks call it.

    Where a task cannot be prepared, rank 0 raises UserError and the other ranks exit with code 2.
    """
    if not config.train.eval_tasks:
        return None
    prepared, problem, told = None, None, [None]
    if mesh.rank == 0:
        try:
            prepared = prepare_tasks(config)
            told = [prepared.windows]
        except UserError as error:
            problem = error
    dist.broadcast_object_list(told, src=0, group=mesh.control)
    if told[0] is None:
        if problem is not None:
            raise problem
        raise SystemExit(2)
    return LiveTasks(config, told[0], prepared)
