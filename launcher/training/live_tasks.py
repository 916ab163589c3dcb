"""Tasks of lm-evaluation-harness on the weights as they train, under the run's own layout.

Rank 0 makes the requests once, at the start; all ranks then hold them as rows of data.seq_len tokens, which are passed
through the model as held-out samples are. Generation has no place in such passes: tasks that generate are refused.
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
    """The tasks' requests, and what is scored to answer them: ``counts`` windows for each request, in order."""

    requests: Requests
    instances: list[Any]
    counts: list[int]
    windows: list[Window]
    n_cut: int  # requests longer than data.seq_len, whose first tokens are left out

    def row(self, answers: Sequence[Answer]) -> dict[str, float]:
        """The tasks' metrics as ``eval/TASK/METRIC``; those that come to no number are left out."""
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
    """What the config asks for."""
    return Asked(config.train.eval_tasks, KEY, limit=config.train.eval_tasks_limit)


def check_task_files(config: RunConfig) -> None:
    """What can be said of train.eval_tasks without a tokenizer: own tasks make their requests. Raises UserError."""
    if not config.train.eval_tasks:
        return
    asked = asked_by(config)
    check_asked(asked)
    own = replace(asked, specs=tuple(filter(is_own, asked.specs)))
    if own.specs:
        requests_of(own)


def check_tasks(config: RunConfig) -> None:
    """Everything but the model: reads the tasks and reckons with made-up answers. Raises UserError.

    The tokenizer has to be there.
    """
    if config.train.eval_tasks:
        prepared = prepare_tasks(config)
        prepared.row([Answer(-1.0 * window.n_scored, False) for window in prepared.windows])


def check_kind(name: str, kind: str | None) -> None:
    """Raises UserError for a task that generates."""
    if kind == "generate_until":
        rule = "generates text (output_type: generate_until), which no evaluation in training does"
        raise UserError([f"{KEY}: {name} {rule}; leave it to `roundtable eval --tasks`"])


def requests_of(asked: Asked) -> Requests:
    """The tasks' requests, as text. Raises UserError where one generates, or cannot make them."""
    loaded = load_tasks(asked)
    for name, task in loaded.tasks.items():
        check_kind(name, task.OUTPUT_TYPE)
    return build_requests(loaded, asked)


def prepare_tasks(config: RunConfig) -> Prepared:
    """The tasks' requests, tokenized. Raises UserError where one cannot be made or answered."""
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
    """In the place of a model, for a reader of the tasks' requests: it is never to be called."""
    raise AssertionError("the ranks score them together")


class LiveTasks:
    """The tasks of a run on one rank. ``prepared`` is on rank 0 alone."""

    def __init__(self, config: RunConfig, windows: list[Window], prepared: Prepared | None) -> None:
        self.train = config.train
        self.windows, self.prepared = windows, prepared
        self.rows: Rows = packed_rows(windows, config.data.seq_len)

    def is_due(self, step: int) -> bool:
        """Whether they are evaluated after this step: every train.eval_tasks_every_steps, and at the end."""
        every = self.train.eval_tasks_every_steps or self.train.eval_every_steps
        return step == self.train.steps or (every is not None and step % every == 0)

    def event(self, step: int) -> Mapping[str, Any]:
        """What rank 0 says of them at the start."""
        prepared = self.prepared
        if prepared is None:
            return {}
        about = {"requests": len(prepared.instances), "sequences": len(self.rows.tokens_RS), "cut": prepared.n_cut}
        return {"step": step, "event": "eval_tasks", "tasks": [*prepared.requests.instances], **about}

    def evaluate(self, engine: Engine, step: int, alive: Callable[[], None]) -> dict[str, Any]:
        """The event of an evaluation on rank 0; {} elsewhere. All ranks call it; ``alive`` after each micro-batch."""

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

    Raises UserError on rank 0 where one cannot be had, and ends the others with the same exit code.
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
