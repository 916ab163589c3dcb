"""`roundtable train --dry-run`: every check of a start, and what the run would take. Nothing is created or changed."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.order import hopped_ranges, place_after
from launcher.config.checked import load_checked
from launcher.config.tree import RunConfig
from launcher.console import say
from launcher.errors import UserError
from launcher.plan.closed_forms import describe_layout, describe_memory, describe_model
from launcher.training.init_from import with_source
from launcher.training.run_dir import newest_manifest
from launcher.training.start import (
    check_evaluated_tasks,
    check_prepared,
    check_ranks,
    check_run_dir,
    check_tokens,
    checkpoint_gib,
    default_ranks,
    room_free_gib,
    room_needed,
    start_checks,
)
from parallel.checkpoint.places import is_remote, local_path
from parallel.processes.world import world_size_from_environment


@dataclass(frozen=True)
class Check:
    """One check of a start: its name, and a line for each problem; none where all is well."""

    name: str
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, check: Callable[[], object]) -> "Check":
        """The result of calling ``check``, which raises UserError or DataError where something is wrong."""
        try:
            check()
        except (UserError, DataError) as error:
            return cls(name, tuple(error.problems))
        return cls(name)


def dry_run(path: Path, overrides: Sequence[str], ranks: int | None, *, as_json: bool) -> int:
    """Prints the checks and the sizes of the run that `train` would start; under srun or torchrun, rank 0 alone prints.

    Returns 0. Raises UserError with every problem, after printing what could be found out nevertheless.
    """
    job_size = world_size_from_environment()
    if job_size is not None:
        check_ranks(ranks, job_size)
    n_ranks = job_size or ranks or default_ranks()
    speaks = job_size is None or first_rank()
    config, about = None, {}
    checks = [Check.of("config and sources", lambda: load_checked(path, overrides, world_size=n_ranks))]
    if not checks[0].problems:
        config = load_checked(path, overrides, world_size=n_ranks)
        checks += check_all(config, path, in_job=job_size is not None)
        about = describe(config, n_ranks, {check.name for check in checks if check.problems})
    problems = list(dict.fromkeys(line for check in checks for line in check.problems))  # two may find one problem
    if speaks:
        print_dry_run({"can_start": not problems, "checks": [asdict(check) for check in checks], **about}, as_json)
    if problems:
        raise UserError(problems)
    return 0


def first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is rank 0 of its job, by the environment that torchrun or Slurm sets."""
    return environment.get("RANK", environment.get("SLURM_PROCID", "0")) == "0"


def check_all(config: RunConfig, path: Path, *, in_job: bool) -> list[Check]:
    """The checks that `train` makes after that of the config, in the same order."""
    checks = [Check.of(name, lambda check=check: check(config)) for name, check in start_checks().items()]
    if not in_job:
        checks.append(Check.of("the run directory's parts, and no other start", lambda: check_run_dir(config)))
    checks.append(Check.of("token files", lambda: check_data(config, path, in_job=in_job)))
    if config.init_from is not None and not any(check.problems for check in checks):
        checks.append(Check.of("init_from", lambda: with_source(config)))
    return checks


def check_data(config: RunConfig, path: Path, *, in_job: bool) -> None:
    """Checks that token files can be opened, or that missing ones can be prepared (in a job they have to be there).

    Raises UserError or DataError where they cannot.
    """
    from data.prepared import find_prepared

    if in_job:
        check_prepared(config, path)
    if find_prepared(config.data, config.model.vocab_size) is not None:
        check_tokens(config)
        check_evaluated_tasks(config)
    else:
        to_prepare(config)


def describe(config: RunConfig, n_ranks: int, failed: set[str]) -> dict[str, Any]:
    """The run's sizes by section, as `--json` prints them; a section whose check is in ``failed`` may be None."""
    resume = None if "checkpoint.dir" in failed else describe_resume(config)
    return {
        "run_dir": str(config.run_path),
        "model": describe_model(config),
        "layout": describe_layout(config, n_ranks),
        "memory": describe_memory(config, n_ranks),
        "disk": describe_disk(config),
        "data": None if "token files" in failed else describe_data(config, so_far(config, resume)),
        "resume": resume,
    }


def describe_disk(config: RunConfig) -> dict[str, Any]:
    """A checkpoint's size, how many may exist at once, and the bytes they need and that are free (None at a URL)."""
    location = config.checkpoint_location
    found = {"checkpoints": location, "checkpoint_bytes": round(checkpoint_gib(config) * 2**30)}
    if is_remote(location):
        return {**found, "most_at_once": None, "needed_bytes": None, "free_bytes": None}
    most, needed_gib = room_needed(config)
    free_bytes = round(room_free_gib(local_path(location)) * 2**30)
    return {**found, "most_at_once": most, "needed_bytes": round(needed_gib * 2**30), "free_bytes": free_bytes}


@dataclass(frozen=True)
class SoFar:
    """The samples that a resumed run has taken so far, whose steps may have had other batch sizes than the config's."""

    step: int = 0
    consumed: int = 0  # where the next sample lies in the order of samples
    skipped: tuple[tuple[int, int], ...] = ()  # ranges of samples that are left out

    @property
    def taken(self) -> int:
        """The number of samples that the steps so far took, without the skipped ones."""
        return self.consumed - sum(last - first for first, last in hopped_ranges(0, self.consumed, self.skipped))

    def to_come(self, config: RunConfig) -> int:
        """The number of samples that the steps from here to the run's last one will take."""
        batches = config.train.batches
        return max(0, batches.samples_in(config.train.steps) - batches.samples_in(self.step))


def so_far(config: RunConfig, resume: Mapping[str, Any] | None) -> SoFar:
    """The progress that the checkpoint to resume from holds; that of step 0 where there is none."""
    newest = newest_manifest(config) if resume is not None and resume["step"] else None
    if newest is None or resume is None or newest.step != resume["step"]:
        return SoFar()
    skipped = tuple((first, last) for first, last in newest.scalars["skipped"])
    return SoFar(newest.step, newest.scalars["consumed"], skipped)


def describe_data(config: RunConfig, done: SoFar) -> dict[str, Any]:
    """The run's tokens, and each source's epochs or, where token files are missing, what would be prepared.

    Steps that were made with other batches than the config's are listed under ``before``.
    """
    from data.prepared import find_prepared

    batches, steps, seq_len = config.train.batches, config.train.steps, config.data.seq_len
    found: dict[str, Any] = {
        "steps": steps,
        "tokens_per_step": batches.sizes[-1] * seq_len,
        "tokens": (done.taken + done.to_come(config)) * seq_len,
    }
    if done.taken != batches.samples_in(done.step):
        found["before"] = {"steps": done.step, "tokens": done.taken * seq_len}
    if config.train.batch_ramp is not None:
        smaller = min(steps, batches.steps[-1])
        ramp = {"tokens_per_step": batches.sizes[0] * seq_len, "steps": smaller}
        found["ramp"] = {**ramp, "tokens": batches.samples_in(smaller) * seq_len}
    prepared = find_prepared(config.data, config.model.vocab_size)
    if prepared is None:
        return {**found, "prepared": False, "to_prepare": to_prepare(config), "sources": None}
    return {**found, "prepared": True, "to_prepare": None, "sources": epochs_of_sources(config, done)}


def epochs_of_sources(config: RunConfig, done: SoFar) -> list[dict[str, Any]]:
    """One row for each source: its share of the run's samples, its samples, steps to an epoch of it, epochs in the run.

    The steps to an epoch are None where a stage ends, or a cap is reached, before the source was read once.
    """
    from data.dataset import open_dataset

    data, train = config.data, config.train
    dataset = open_dataset(data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    total, rows = place_after(done.consumed, done.to_come(config), done.skipped), []
    given = dataset.stages.expected(total)
    for number, (source, samples) in enumerate(zip(data.sources, dataset.source_samples, strict=True)):
        all_given = dataset.stages.expected_at(number, samples)
        epochs = {
            "steps_to_an_epoch": train.batches.steps_for(float(all_given)) if all_given is not None else None,
            "epochs": float(given[number] / samples),
        }
        rows.append({"path": source.path, "share": float(given[number] / total), "samples": samples, **epochs})
    return rows


def to_prepare(config: RunConfig) -> list[dict[str, Any]]:
    """What `prepare` would read for each source that is not finished; amounts are None for a Hugging Face dataset.

    Raises DataError in the cases in which `prepare` refuses to begin, such as missing files or too little room.
    """
    from data.prepare import check_room, plan_sources
    from data.sources import is_hugging_face, is_raw

    vocab_size = config.model.vocab_size
    hub = [source for source in config.data.sources if is_raw(source) and is_hugging_face(source)]
    rows = [{"path": source.path, "files": None, "text_bytes": None, "shards": None} for source in hub]
    if hub:  # to plan these would download their file lists
        return rows
    plans = plan_sources(config.data, vocab_size)
    check_room(config.data, plans, vocab_size)
    for plan in plans:
        text_bytes = sum(piece.n_bytes for shard in plan.shards for piece in shard)
        amounts = {"files": len(plan.files), "text_bytes": text_bytes, "shards": len(plan.shards)}
        rows.append({"path": plan.source.path, **amounts})
    return rows


def describe_resume(config: RunConfig) -> dict[str, Any]:
    """The step that the run would go on from (0: the start), and checkpoints that look damaged."""
    from parallel.checkpoint.places import list_checkpoints
    from parallel.checkpoint.retention import looks_whole
    from parallel.checkpoint.store import step_of

    damaged = []
    for folder in reversed(list_checkpoints(config.checkpoint_location)):
        if looks_whole(folder):
            return {"step": step_of(folder.name), "steps": config.train.steps, "damaged": damaged}
        damaged.append(folder.name)
    return {"step": 0, "steps": config.train.steps, "damaged": damaged}


def print_dry_run(found: dict[str, Any], as_json: bool) -> None:
    """Prints the report as JSON or as tables."""
    if as_json:
        say(json.dumps(found, indent=2))
        return
    from launcher.plan.text import print_report

    print_report(found)
