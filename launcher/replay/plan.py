"""Plans a replay: from which checkpoint, with which config for each step, on which layout. Writes nothing."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.config import FREE_FIELDS
from launcher.config.checked import load_checked
from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.config.words import show
from launcher.errors import UserError
from launcher.replay.record import Ranges, Record, Start
from launcher.training.run_dir import changes, checkpoints_of
from launcher.training.run_parts import CONFIG
from parallel.checkpoint.manifest import DamagedCheckpoint
from parallel.checkpoint.places import list_checkpoints
from parallel.checkpoint.read import Checkpoint, open_checkpoint
from parallel.checkpoint.store import Folder, step_of

# Keys that a replay may change: they say where and how a step is computed, not what.
LAYOUT_KEYS = (
    "parallel",
    "train.micro_batch_size",
    "train.recompute",
    "train.activation_gib",
    "train.offload_activations",
    "train.fp8_keep_weights",
    "train.compile",
    "train.flash_attention",
    "train.timeout_seconds",
    "train.deterministic",
)
FREE_KEYS = (*LAYOUT_KEYS, *(f"data.{name}" for name in FREE_FIELDS))
# Those of FREE_KEYS that determine the order of sums, and so the last bits of results.
ORDER_KEYS = ("parallel", "train.micro_batch_size", "train.compile", "train.flash_attention", "train.deterministic")
# What an engine is built with, so that it cannot change between the steps of one replay.
BUILT_IN = ("optimizer", "train.precision")


@dataclass(frozen=True)
class Plan:
    """The plan of a replay, handed to each rank: the steps after ``begins_at`` up to ``step`` are executed."""

    run_path: str  # for messages
    step: int
    begins_at: int  # the step of the checkpoint; 0: without a checkpoint, from the initial weights
    checkpoint: str | None  # its location
    config: RunConfig  # that of ``step``, on the replay's layout; its run directory is a scratch folder
    configs: dict[int, RunConfig]  # step -> its recorded config on the replay's layout
    skipped: dict[int, Ranges]  # step -> samples that are left out
    n_ranks: int
    exact: dict[int, bool]  # step -> whether it must match bit for bit: it and all before it had the replay's layout
    notes: tuple[str, ...]


def make_plan(
    run_path: Path,
    record: Record,
    step: int,
    overrides: Sequence[str],
    *,
    ranks: int | None,
    begin: int | None,
    scratch: str,
) -> Plan:
    """The plan to execute ``step`` again. The config's relative paths are resolved in the current folder.

    ``ranks`` None: as many as the recorded start had. ``begin`` None: the nearest checkpoint before ``step``.
    ``scratch`` is the folder that the ranks may write to. Raises UserError for a step that was not reached, a
    checkpoint that is gone or damaged, a config of which no copy is left, and a layout that does not fit.
    """
    check_reached(run_path, record, step)
    folders = {number: each for each in list_checkpoints(checkpoints_of(run_path)) if (number := step_of(each.name))}
    chosen = choose_checkpoint(run_path, record, step, sorted(folders), begin)
    steps = range(chosen + 1, step + 1)
    if not record.updates.keys() >= set(steps):
        missing = min(set(steps) - record.updates.keys())
        raise UserError([f"RUN={run_path}: step {missing} is not in metrics.jsonl, and step {step} follows from it"])
    checkpoint = open_whole(folders[chosen], run_path) if chosen else None
    near = sorted(folders, key=lambda each: (abs(each - step), each))
    files = ConfigFiles(run_path, [folders[each] for each in near])
    starts = {number: record.updates[number].start for number in steps}
    paths = {start: files.of(start, run_path, step) for start in set(starts.values())}
    last = starts[step]
    recorded = {start: load_config(path) for start, path in paths.items()}
    n_ranks = ranks or last.ranks or 1
    chosen_layout = load_config(paths[last], overrides)
    check_same_run(recorded[last], chosen_layout)  # before rules whose remedies change the run
    for start, number in sorted({starts[each]: each for each in steps}.items(), key=lambda each: -each[1]):
        check_fits(on_layout(recorded[start], chosen_layout), number, step, n_ranks)
    config = load_checked(paths[last], overrides, world_size=n_ranks)
    for start, each in recorded.items():
        check_built_alike(start, each, recorded[last], step)
    exact, so_far = {}, True
    for number in steps:
        start = starts[number]
        same = not keys_of(changes(recorded[start], on_layout(recorded[start], config)), ORDER_KEYS)
        so_far = so_far and same and start.ranks in (None, n_ranks)
        exact[number] = so_far
    return Plan(
        run_path=str(run_path),
        step=step,
        begins_at=chosen,
        checkpoint=checkpoint.folder.location if checkpoint is not None else None,
        config=dataclasses.replace(config, run_dir=scratch),
        configs={number: on_layout(recorded[starts[number]], config) for number in steps},
        skipped={number: record.updates[number].skipped for number in steps},
        n_ranks=n_ranks,
        exact=exact,
        notes=tuple(notes_of(set(starts.values()))),
    )


def check_reached(run_path: Path, record: Record, step: int) -> None:
    """Raises UserError where metrics.jsonl has no row of the step."""
    if step in record.updates:
        return
    if step > record.last:
        reached = f"the run's last recorded step is {record.last}" if record.last else "the run has recorded no step"
        raise UserError([f"--step={step} was not reached in {run_path}: {reached}; give one from 1 on up to that"])
    raise UserError([f"--step={step} is not in the metrics.jsonl of {run_path}; give a step that it holds, from 1 on"])


def choose_checkpoint(run_path: Path, record: Record, step: int, there: Sequence[int], begin: int | None) -> int:
    """The step of the checkpoint to begin at: ``begin``, or the nearest before ``step``; 0 for the initial weights.

    ``there`` are the steps of the checkpoints that still exist, sorted. Raises UserError for a ``begin`` that is not
    one of them, and where earlier checkpoints were saved but none is left: since the way from the initial weights may
    be long, the user must ask for it.
    """
    before = [number for number in there if number < step]
    shown = ", ".join(map(str, before)) or "none"
    if begin is not None:
        if begin != 0 and begin not in before:
            rule = f"must be 0 or the step of a checkpoint before step {step} that is there ({shown})"
            raise UserError([f"--from={begin} {rule}; give one of those, or leave it out"])
        return begin
    if before:
        return before[-1]
    gone = sorted(number for number in record.saved if 0 < number < step)
    if gone:
        rule = (
            f"needs a checkpoint from before it, and those of {run_path} (after {', '.join(map(str, gone))}) are gone"
        )
        later = f", or a step after {there[0]}" if there else ""
        raise UserError([f"--step={step} {rule}; give --from 0 to begin at the initial weights{later}"])
    return 0


def open_whole(folder: Folder, run_path: Path) -> Checkpoint:
    """Opens a checkpoint after checking its manifest and file sizes; hashes are checked when the ranks read it.

    Raises UserError where it is damaged.
    """
    try:
        return open_checkpoint(folder, verify=False)
    except DamagedCheckpoint as error:
        raise UserError([damage_line(run_path, folder.name, error)]) from None


def damage_line(run_path: Path | str, name: str, error: DamagedCheckpoint) -> str:
    """The error message for a damaged checkpoint."""
    return f"RUN={run_path}: its checkpoint {name} is damaged ({error}); give --from with the step of another"


class ConfigFiles:
    """Finds the config of each start of a run by its hash: config.yaml's, or a copy in one of its checkpoints."""

    def __init__(self, run_path: Path, folders: Iterable[Folder]) -> None:
        self.own = run_path / CONFIG
        self.others = iter(folders)
        self.opened: list[Checkpoint] = []  # kept, since a config copy exists only as long as its checkpoint object
        self.by_hash = {hash_of(self.own): self.own}

    def of(self, start: Start, run_path: Path, step: int) -> Path:
        """The path of the config that ``start`` used; config.yaml where the record has no hash of it.

        Opens checkpoints one after another until one has it. Raises UserError where none does.
        """
        wanted = start.config_sha256
        if wanted is None:
            return self.own
        while wanted not in {found[: len(wanted)] for found in self.by_hash}:
            folder = next(self.others, None)
            if folder is None:
                rule = "whose config neither config.yaml nor a checkpoint still holds"
                raise UserError([f"--step={step} of {run_path} follows from a start {rule}; give a step after that"])
            with suppress(DamagedCheckpoint):
                self.opened.append(open_checkpoint(folder, verify=False))
                copy = self.opened[-1].attached(CONFIG)
                if copy is not None:
                    self.by_hash.setdefault(hash_of(copy), copy)
        return next(path for found, path in self.by_hash.items() if found.startswith(wanted))


def hash_of(path: Path) -> str:
    """sha256 of a config file's bytes, in hex; equals `launcher.guard.agreement.hash_of_config` of the saved config."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def keys_of(differing: Iterable[tuple[str, object, object]], within: Sequence[str]) -> list[str]:
    """Those of the differing keys that are in ``within`` or lie below a key in it."""
    return [key for key, *_ in differing if any(f"{key}.".startswith(f"{each}.") for each in within)]


def check_same_run(recorded: RunConfig, config: RunConfig) -> None:
    """Raises UserError for overrides of keys outside FREE_KEYS, on which the recorded numbers depend."""
    differing = list(changes(recorded, config))
    free = set(keys_of(differing, FREE_KEYS))
    rule = "since a replay is compared with what was recorded; only the layout, and where token files lie, may change"
    problems = [
        f"{key}={show(after)} must stay {show(before)}, {rule}; leave it out"
        for key, before, after in differing
        if key not in free
    ]
    if problems:
        raise UserError(problems)


def check_fits(config: RunConfig, number: int, step: int, n_ranks: int) -> None:
    """Raises UserError where the config of step ``number`` breaks a rule on this layout.

    Remedies that would change the run itself are replaced by one that names the layout.
    """
    where = f" in step {number}, which --step={step} follows from" if number != step else ""
    lines = check(config, n_ranks)
    for place, line in enumerate(lines):
        if where or not f"{line.partition('=')[0]}.".startswith(tuple(f"{key}." for key in FREE_KEYS)):
            remedy = "choose another layout, --ranks or train.micro_batch_size"
            lines[place] = f"{line.partition(';')[0]}{where}; {remedy}"
    if lines:
        raise UserError(lines)


def check_built_alike(start: Start, config: RunConfig, last: RunConfig, step: int) -> None:
    """Raises UserError where an earlier start's config differs from the last one's in a key of BUILT_IN."""
    found = [key for key in keys_of(changes(config, last), BUILT_IN) if key != "optimizer.lr"]
    if found:
        line = f"--step={step}: {found[0]} was changed by a start since the nearest checkpoint that is there"
        raise UserError([f"{line}; give --from with the step of a checkpoint after that, or another step"])


def on_layout(recorded: RunConfig, chosen: RunConfig) -> RunConfig:
    """The recorded config of a step with the layout (LAYOUT_KEYS) and the data section of ``chosen``."""
    own = {key.removeprefix("train.") for key in LAYOUT_KEYS if key.startswith("train.")}
    train = dataclasses.replace(recorded.train, **{key: getattr(chosen.train, key) for key in own})
    return dataclasses.replace(recorded, parallel=chosen.parallel, train=train, data=chosen.data)


def notes_of(starts: Iterable[Start]) -> Iterable[str]:
    """One line for each recorded code hash that is not this code's, since that may explain different numbers."""
    from launcher.guard.agreement import hash_of_code

    own = hash_of_code()
    for code in sorted({start.code_sha256 for start in starts if start.code_sha256 is not None}):
        if not own.startswith(code):
            yield f"the run was made by other code ({code}) than this ({own[:12]})"
