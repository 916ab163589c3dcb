"""`roundtable average CHECKPOINT... OUT`: a run directory whose weights are the mean of several checkpoints'.

Averages of a run's last checkpoints come close to what a decay of the learning rate would reach (Sanyal et al. 2023,
arXiv:2306.03241; Li et al. 2025, arXiv:2505.12082). Averages of runs that share their beginning can be better than each
of these runs (Wortsman et al. 2022, arXiv:2203.05482).
"""

import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import read_vocab
from launcher.commands.import_model import place_problems, room_problems, shown_progress
from launcher.commands.trained import Trained, find_candidates, naming_tokenizer, no_checkpoint, open_one, open_trained
from launcher.config.tree import RunConfig
from launcher.config.words import join_and
from launcher.console import in_a_line, say
from launcher.errors import UserError
from launcher.importing.folder import GENERATION_JSON
from launcher.importing.run import write_run
from launcher.importing.token_ids import TOKEN_IDS_JSON
from launcher.training.init_from import differing_keys, told_value
from launcher.training.run_dir import saved_config, start_folder
from launcher.training.run_parts import CHECKPOINTS
from launcher.training.state import tokenizer_files
from modeling.logical import logical_tensors
from parallel.checkpoint.boxes import boxes_of_range
from parallel.checkpoint.manifest import ELEMENT_BYTES, DamagedCheckpoint
from parallel.checkpoint.places import is_remote
from parallel.processes.stop import undoing

AVERAGED_JSON = "averaged.json"  # the file in the new checkpoint that lists the averaged checkpoints
BLOCK_ELEMENTS = 1 << 22  # elements of one tensor that are read at a time from each checkpoint
MOST_WEIGHT = 1_000_000  # the largest weight of a checkpoint; the smallest is 1 / MOST_WEIGHT
OTHERS = "give checkpoints of one model"


@dataclass(frozen=True)
class Mean:
    """The weighted mean of checkpoints of one model."""

    members: Sequence[Trained]
    weights: Sequence[float]  # one of each checkpoint, positive

    @property
    def elements(self) -> int:
        """The number of elements of all logical tensors."""
        return sum(math.prod(each.shape) for each in logical_tensors(self.members[0].config.model).values())

    def blocks(self, name: str, on_bytes: Callable[[int], None] = lambda _: None) -> Iterator[Tensor]:
        """The elements of one logical tensor in order, in flat fp32 blocks, averaged in fp64.

        ``on_bytes`` is called with the number of bytes of each read. Raises UserError where a checkpoint is gone or has
        changed, or holds NaN or infinity.
        """
        shape, weight_of_all = self.members[0].checkpoint.shape(name), math.fsum(self.weights)
        for start in range(0, math.prod(shape), BLOCK_ELEMENTS):
            stop = min(start + BLOCK_ELEMENTS, math.prod(shape))
            for box in boxes_of_range(shape, start, stop):
                total = torch.zeros(box.shape, dtype=torch.float64)
                for member, weight in zip(self.members, self.weights, strict=True):
                    read = member.read_box(name, box)
                    if not read.isfinite().all():
                        rule = f"must hold finite numbers, and {name} holds NaN or infinity"
                        raise UserError([f"CHECKPOINT={member.checkpoint.folder.location} {rule}; leave it out"])
                    total.add_(read, alpha=weight)
                    on_bytes(ELEMENT_BYTES * box.numel)
                yield total.div_(weight_of_all).float().flatten()


@undoing()
def average_checkpoints(given: Sequence[str], out: str, last: int | None, weights: str | None) -> None:
    """Writes the mean of the checkpoints that ``given`` names to the run directory ``out``, and prints what it is.

    A run directory stands for its newest good checkpoint, or for its ``last`` newest ones. ``weights``: one number for
    each checkpoint, comma-separated; None: all count alike. As after an import, the result holds weights without the
    optimizer's states; its config is the first checkpoint's. Raises UserError, before anything is created, where an
    argument is wrong.
    """
    problems = place_problems(out)
    if problems:
        raise UserError(problems)
    members = [member for path in given for member in opened(path, last)]
    if len(members) < 2:
        raise UserError(
            [f"CHECKPOINT={given[0]} is one checkpoint, and a mean is of at least two; give more, or --last of a run"]
        )
    numbers = numbers_of(weights, len(members))
    places = [place_of(member) for member in members]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise UserError(
            [f"CHECKPOINT={twice} must be given once; leave the second out, and give --weights to count it more"]
        )
    first = members[0]
    problems = [*unlike_problems(members)] or inside_problems(members, Path(out))
    if problems:
        raise UserError(problems)
    mean, config = Mean(members, numbers), config_for(first.config, Path(out))
    problems = room_problems(Path(out), mean.elements)
    if problems:
        raise UserError(problems)
    folder = Path.cwd() if first.run is None else start_folder(first.run, first.config)
    with shown_progress(ELEMENT_BYTES * mean.elements * len(members), "averaging") as on_bytes:
        write_run(Path(out), config, mean, None, kept_of(mean), on_bytes, started_in=folder)
    say(in_a_line(f"{out}: the mean of {len(members)} checkpoints, {mean.elements:,} weights ({told(members)})"))
    begun = f"init_from: {out} begins a run with these weights"
    say(f"`roundtable eval {shlex.quote(out)}` prints its held-out loss; {begun}")


def opened(path: str, last: int | None) -> Iterator[Trained]:
    """The checkpoints that ``path`` stands for, oldest first, every hash compared. Raises UserError.

    They are the one that ``path`` is, or the newest good one of a run, or with ``last`` so many of its newest.
    """
    if last is None:
        yield open_trained(path)
        return
    run, candidates = find_candidates(path)
    if len(candidates) < last:
        there = ", ".join(each.name for each in candidates)
        if not candidates:
            raise UserError([no_checkpoint("CHECKPOINT", path)])
        raise UserError([f"--last={last} must be at most {len(candidates)}, CHECKPOINT={path} has {there}; try that"])
    for folder in candidates[-last:]:
        try:
            yield open_one(path, run, folder)
        except DamagedCheckpoint as error:  # the mean without it is not what the user asked for
            remedy = "give the others by their folders"
            raise UserError([f"CHECKPOINT={folder.location} is damaged ({error}); {remedy}"]) from None


def numbers_of(weights: str | None, count: int) -> list[float]:
    """The weight of each checkpoint in the mean, 1 without ``weights``. Raises UserError unless these are ``count``."""
    if weights is None:
        return [1.0] * count
    try:
        numbers = [float(word) for word in weights.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(1 / MOST_WEIGHT <= each <= MOST_WEIGHT for each in numbers):
        example = ",".join(map(str, range(1, count + 1)))
        rule = (
            f"must be {count} numbers from {1 / MOST_WEIGHT:f} to {MOST_WEIGHT}, one for each checkpoint, with commas"
        )
        raise UserError([f"--weights={weights} {rule}; try {example}, or leave it out: all count alike"])
    return numbers


def place_of(member: Trained) -> str:
    """The checkpoint's URL, or its path with links resolved, so that two ways to name it compare equal."""
    location = member.checkpoint.folder.location
    return location if is_remote(location) else os.path.realpath(location)


def unlike_problems(members: Sequence[Trained]) -> Iterator[str]:
    """One line for each config key or tokenizer in which a checkpoint's model differs from the first one's."""
    first, there, known = members[0], members[0].checkpoint.folder.location, vocab_of(members[0])
    for other in members[1:]:
        here, vocab = other.checkpoint.folder.location, vocab_of(other)
        for key, theirs, ours in differing_keys(first.config, other.config):
            yield f"CHECKPOINT={here}: {key}={told_value(ours)} must be {told_value(theirs)}, as in {there}; {OTHERS}"
        if None in (known, vocab) and known != vocab:
            has, lacks = (here, there) if known is None else (there, here)
            yield f"CHECKPOINT={here}: {has} has a tokenizer, and {lacks} has none; {OTHERS}"
        elif vocab != known:
            yield f"CHECKPOINT={here}: its tokenizer must have the ids that the one of {there} has; {OTHERS}"


def vocab_of(trained: Trained) -> dict[str, int] | None:
    """The ids of the checkpoint's tokenizer by token; None where it has no tokenizer."""
    if trained.tokenizer is None:
        return None
    with naming_tokenizer(trained.checkpoint, "CHECKPOINT") as found:
        return read_vocab(trained.tokenizer, found, OTHERS)


def inside_problems(members: Sequence[Trained], out: Path) -> list[str]:
    """A line where OUT would lie in one of the averaged runs or checkpoints, which are only read."""
    read = [Path(place_of(member)) for member in members if not is_remote(member.checkpoint.folder.location)]
    read += [member.run for member in members if member.run is not None and saved_config(member.run) is not None]
    place = out.absolute().resolve()
    inside = [folder for folder in read if place.is_relative_to(folder.resolve())]
    return [f"OUT={out} must lie outside {inside[-1]}, which is only read; give another path"] if inside else []


def config_for(config: RunConfig, out: Path) -> RunConfig:
    """The config of the mean's run directory: the first checkpoint's, with ``out`` as its place and name."""
    out = out.absolute()
    name = out.name if "\\" not in out.name else RunConfig.name
    own = replace(config.checkpoint, dir=None)
    return replace(config, name=name, run_dir=str(out), init_from=None, checkpoint=own)


def kept_of(mean: Mean) -> dict[str, Any]:
    """The small files of the new checkpoint, content or path by name.

    They are the first member's tokenizer, generation_config.json and token ids, and the list of all members.
    """
    first = mean.members[0]
    members = [
        {
            "checkpoint": place_of(member),
            "step": member.checkpoint.step,
            "tokens": member.checkpoint.manifest.scalars["tokens"],
            "weight": weight,
        }
        for member, weight in zip(mean.members, mean.weights, strict=True)
    ]
    files = tokenizer_files(first.tokenizer)
    for name in (GENERATION_JSON, TOKEN_IDS_JSON):
        path = first.checkpoint.attached(name)
        files |= {} if path is None else {name: path}
    return {**files, AVERAGED_JSON: json.dumps(members, indent=2).encode() + b"\n"}


def told(members: Sequence[Trained]) -> str:
    """The checkpoints in a line: each run's folder and its steps."""
    steps: dict[str, list[int]] = {}
    for member in members:
        run = member.checkpoint.folder.location.partition(f"/{CHECKPOINTS}/")[0]
        steps.setdefault(run, []).append(member.checkpoint.step)
    return "; ".join(
        f"{run} at {'steps' if found[1:] else 'step'} {join_and([*map(str, found)])}" for run, found in steps.items()
    )
