"""The layout's side of a proof: what each rank runs, and what it hands back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from data.batch import Batch
from data.dataset import open_dataset
from launcher.config.tree import RunConfig
from launcher.prove.compare.boxes import TensorBox, weight_boxes
from launcher.prove.compare.gradients import gradient_boxes
from launcher.prove.compare.outputs import record_outputs
from launcher.prove.compare.routing import (
    TIE_GAP,
    ChoiceReplay,
    HeldTokens,
    Replayed,
    StepChoices,
    positions_between_layers,
)
from launcher.prove.tokens import WatchedDataset
from launcher.training.loop import build_engine, heldout_loss, run_step
from launcher.training.state import TrainState, save
from launcher.training.step import accumulate_gradients
from parallel.checkpoint.load import load_state
from parallel.checkpoint.read import open_checkpoint
from parallel.checkpoint.retention import Retention
from parallel.mesh import Mesh, close_mesh, open_mesh
from parallel.processes.stop import StopRequest
from parallel.sizes import DEFAULT_SIZES, Sizes
from parallel.zero.engine import Engine, StepResult

# In the proof's folder:
PROGRESS = "progress.txt"  # a file with one line for each piece of work that rank 0 begins
LAYOUT_CHECKPOINTS = "layout"  # the folder of checkpoints that the layout saves
PLAIN_CHECKPOINT = "plain"  # the checkpoint that one process has saved
BEFORE_STEPS, AFTER_STEPS, AFTER_LOAD = (
    "before the steps",
    "after the steps",
    "after the load",
)  # when held-out samples are evaluated


REPEATS = (
    8  # how often one round of micro-batches is accumulated; a power of two, so that dividing by it rounds nothing
)


@dataclass(frozen=True)
class PhasePlan:
    """One phase of the proof, with an engine of its own: ``steps`` updates from step 0, and what the flags ask for."""

    name: str
    config: RunConfig
    steps: int
    choices: Sequence[StepChoices]  # the reference's, by step; one more than ``steps`` where a checkpoint is loaded
    heldout_choices: Mapping[
        str, StepChoices
    ]  # when to evaluate (BEFORE_STEPS, AFTER_STEPS, AFTER_LOAD) -> the reference's choices
    tie_bound: float  # a differing choice at a smaller gap is replayed
    tie_bound_after_load: float = TIE_GAP
    sizes: Sizes = DEFAULT_SIZES
    watches: bool = False  # hand back the first step's outputs of the modules
    saves: bool = False  # save a checkpoint, then make one more step
    loads: bool = False  # load one process's checkpoint, then make one more step
    repeats: bool = False  # accumulate one round of micro-batches, then REPEATS equal rounds
    overflows: bool = False  # make one rank's gradient overflow, once on the first rank and once on the last


@dataclass(frozen=True)
class Plan:
    """All phases that the ranks of a proof go through in one start."""

    phases: Sequence[PhasePlan]
    folder: Path
    timeout_seconds: int


@dataclass(frozen=True)
class OutputSeen:
    """A module's output for one micro-batch: hidden states (sequences, held positions, d_model), fp32 on the CPU."""

    module: str
    samples: list[int]
    positions: Tensor
    hidden_BPD: Tensor


@dataclass
class StepSeen:
    """One update as one rank saw it."""

    row: dict[str, Any]  # the step's row of metrics.jsonl
    gradients: list[TensorBox]  # reduced, before clipping
    samples: dict[int, str]  # sample number -> hash of the batch row that this rank read
    outputs: list[OutputSeen] = field(default_factory=list)  # of the first step, where the plan asks for them


@dataclass
class OverflowSeen:
    """An update in which the gradient of rank ``at`` overflowed, as one rank saw it."""

    at: int
    skipped: bool
    scale: float  # after the step
    is_unchanged: bool  # this rank's weights and states


@dataclass
class EvaluationSeen:
    """The held-out loss that one rank computed, and the names of its tensors that the evaluation changed."""

    loss: float
    changed: list[str]


@dataclass
class PhaseSeen:
    """One phase as one rank saw it."""

    initial: list[TensorBox]
    steps: list[StepSeen] = field(default_factory=list)
    weights: list[TensorBox] = field(default_factory=list)  # after the steps
    buffers: dict[str, Tensor] = field(default_factory=dict)
    replayed: Replayed = field(default_factory=Replayed)
    evaluations: dict[str, EvaluationSeen] = field(default_factory=dict)  # moment -> result
    overflows: list[OverflowSeen] = field(default_factory=list)
    once: list[TensorBox] = field(default_factory=list)  # gradients of one round of micro-batches
    repeated: list[TensorBox] = field(default_factory=list)  # of REPEATS equal rounds
    after_save: StepSeen | None = None
    after_save_weights: list[TensorBox] = field(default_factory=list)
    loaded: list[TensorBox] = field(default_factory=list)
    loaded_buffers: dict[str, Tensor] = field(default_factory=dict)
    replayed_after_load: Replayed = field(default_factory=Replayed)
    after_load: StepSeen | None = None
    after_load_weights: list[TensorBox] = field(default_factory=list)


@dataclass
class RankSeen:
    """What one rank hands back. ``reads_as`` is its rank on dp: ranks that differ in it read different samples."""

    place: str
    reads_as: int
    phases: dict[str, PhaseSeen]


def prove_rank(plan: Plan, before: Callable[[], None] | None = None) -> RankSeen:
    """Runs all phases on this rank. All ranks call it. ``before`` is called first: tests plant faults with it."""
    if before is not None:
        before()
    mesh = open_mesh(plan.phases[0].config.parallel, plan.timeout_seconds)
    phases = {phase.name: run_phase(phase, mesh, plan.folder) for phase in plan.phases}
    close_mesh()
    return RankSeen(mesh.place, mesh.dp.rank, phases)


def run_phase(plan: PhasePlan, mesh: Mesh, folder: Path) -> PhaseSeen:
    """Runs one phase on this rank: the steps, the evaluations, and what ``plan`` asks for. All ranks call it."""
    tell = Teller(folder, plan.name, mesh.rank == 0)
    tell("build")
    rank = PhaseRank(plan, mesh)
    rank.engine.initialize_weights(plan.config.seed)
    seen = PhaseSeen(weight_boxes(rank.engine), replayed=rank.replayed, evaluations=rank.evaluations)
    rank.evaluate(BEFORE_STEPS)
    if plan.repeats:
        tell(f"accumulate {REPEATS} times")
        seen.once, seen.repeated = rank.accumulate(1), rank.accumulate(REPEATS)
    for step in range(plan.steps):
        tell(f"step {step + 1} of {plan.steps}")
        watched = rank.step_watched if plan.watches and step == 0 else rank.step
        seen.steps.append(watched(plan.choices[step]))
    rank.evaluate(AFTER_STEPS)
    seen.weights = weight_boxes(rank.engine)
    seen.buffers = rank.buffers()
    if plan.overflows:
        tell("overflow on one rank")
        seen.overflows = [rank.overflow(at) for at in dict.fromkeys((0, mesh.world_size - 1))]
    if plan.saves:
        tell("save")
        save(folder / LAYOUT_CHECKPOINTS, rank.engine, rank.state, None, Retention(keep_last=1))
        seen.after_save = rank.step(plan.choices[plan.steps])
        seen.after_save_weights = weight_boxes(rank.engine)
    if plan.loads:
        tell("load")
        rank.load(folder / PLAIN_CHECKPOINT)
        seen.loaded, seen.loaded_buffers = weight_boxes(rank.engine), rank.buffers()
        rank.replay.seen = seen.replayed_after_load
        rank.evaluate(AFTER_LOAD)
        seen.after_load = rank.step(plan.choices[plan.steps], plan.tie_bound_after_load)
        seen.after_load_weights = weight_boxes(rank.engine)
    return seen


class Teller:
    """Writes a phase's lines of progress into the proof's folder, on the rank that ``speaks``."""

    def __init__(self, folder: Path, phase: str, speaks: bool) -> None:
        self.folder = folder
        self.phase = phase
        self.speaks = speaks

    def __call__(self, what: str) -> None:
        """Appends one line to the progress file."""
        if self.speaks:
            note_progress(self.folder, f"{self.phase}: {what}")


def note_progress(folder: Path, line: str) -> None:
    """Appends a line to the folder's PROGRESS, which the launching process shows. Rank 0 calls it."""
    with (folder / PROGRESS).open("a") as file:
        file.write(f"{line}\n")


class WatchedEngine(Engine):
    """The real engine, with a copy of each step's gradients taken before they are applied or dropped."""

    boxes_of_gradients: list[TensorBox]  # of the last step

    def step(self, lr: float) -> StepResult:
        """Copies the gradients, then makes the engine's step."""
        self.boxes_of_gradients = gradient_boxes(self)
        return super().step(lr)

    def discard(self) -> StepResult:
        """Copies the gradients, then drops the step, as the engine does where no target of the batch counts."""
        self.boxes_of_gradients = gradient_boxes(self)
        return super().discard()


class PhaseRank:
    """The real engine and the real loop's step, watched: the batches read, the routers' choices, the gradients."""

    def __init__(self, plan: PhasePlan, mesh: Mesh) -> None:
        config = plan.config
        self.plan, self.config = plan, config
        opened = {"seed": config.seed, "vocab_size": config.model.vocab_size}
        self.dataset = WatchedDataset.watching(open_dataset(config.data, split="train", **opened))
        self.heldout = WatchedDataset.watching(open_dataset(config.data, split="heldout", **opened))
        self.read_from = self.dataset
        self.evaluations: dict[str, EvaluationSeen] = {}
        engine = build_engine(config, mesh, plan.sizes, WatchedEngine)
        assert isinstance(engine, WatchedEngine)
        self.engine = engine
        self.state = TrainState()
        self.replayed = Replayed()
        self.positions = positions_between_layers(config.data.seq_len, mesh)
        self.replay = ChoiceReplay(self.engine.model, self.held_tokens, self.replayed)

    def held_tokens(self, number: int) -> HeldTokens:
        """The tokens of the step's micro-batch ``number`` at the positions held between layers."""
        samples, batch = self.read_from.reads[number]
        documents_BS = torch.from_numpy(batch.documents_BS)
        return HeldTokens(samples.tolist(), self.positions, documents_BS[:, self.positions])

    def step(self, choices: StepChoices | None, tie_bound: float | None = None) -> StepSeen:
        """One update by the training loop's own step. Routers' choices are compared with ``choices``, if given.

        A choice that differs at a gap below ``tie_bound`` (None: the plan's) is replayed. All ranks call it.
        """
        self.dataset.reads.clear()
        self.replay.start_step(choices, self.plan.tie_bound if tie_bound is None else tie_bound)
        row = run_step(self.config, self.engine, self.dataset, self.state).row
        samples = {
            int(sample): hash_row(batch, number)
            for indices, batch in self.dataset.reads
            for number, sample in enumerate(indices)
        }
        return StepSeen(row, self.engine.boxes_of_gradients, samples)

    def step_watched(self, choices: StepChoices | None) -> StepSeen:
        """One update as ``step`` makes it, with the modules' outputs recorded too. All ranks call it."""
        hidden: dict[str, list[Tensor]] = {}
        end = record_outputs(self.engine.model, lambda name, output: hidden.setdefault(name, []).append(output))
        seen = self.step(choices)
        end()
        for name, outputs in hidden.items():
            for number, hidden_BPD in enumerate(outputs):
                samples = self.dataset.reads[number][0].tolist()
                seen.outputs.append(OutputSeen(name, samples, self.positions, hidden_BPD))
        return seen

    def evaluate(self, moment: str) -> None:
        """Evaluates with the training loop's own code, if the plan asks for it at this moment. All ranks call it."""
        if moment not in self.plan.heldout_choices:
            return
        before = self.state_by_name()
        self.read_from = self.heldout
        self.heldout.reads.clear()
        bound = self.plan.tie_bound_after_load if moment == AFTER_LOAD else self.plan.tie_bound
        self.replay.start_step(self.plan.heldout_choices[moment], bound)
        loss = heldout_loss(self.config, self.engine, self.heldout, lambda: None)
        self.read_from = self.dataset
        after = self.state_by_name()
        changed = [name for name in before | after if not same_tensor(before.get(name), after.get(name))]
        self.evaluations[moment] = EvaluationSeen(loss, changed)

    def state_by_name(self) -> dict[str, Tensor | None]:
        """Copies of everything that an evaluation has to leave alone, on this rank."""
        state: dict[str, Tensor | None] = dict(self.buffers())
        for fragment in self.engine.fragments:
            for kind, piece in self.engine.pieces(fragment).items():
                state[f"{kind} of {fragment.name}"] = piece.clone()
        for name, kept in self.engine.kept_weights().items():
            state[name] = kept.clone()
        for name, weight in self.engine.model.named_parameters():
            state[f"gradient of {name}"] = None if weight.grad is None else weight.grad.clone()
        return state

    def accumulate(self, repeats: int) -> list[TensorBox]:
        """The mean gradient of ``repeats`` equal rounds of micro-batches; it is not applied. All ranks call it.

        The rounds' gradients are equal bit for bit, so only rounding in the sum makes the mean differ from one round's.
        A round is one micro-batch, or under pp as many as every schedule takes. Each round's loss is divided by
        ``repeats``; so in fp16 the loss scale is made proportional to it, or else gradients below fp16's normal numbers
        would round otherwise.
        """
        mesh, size = self.engine.mesh, self.config.train.micro_batch_size
        n_micro_batches = 1 if mesh.pp.degree == 1 else 2 * mesh.pp.degree
        round_of_samples = np.arange(mesh.dp.degree * size * n_micro_batches)
        self.dataset.reads.clear()
        self.replay.start_step(None, 0.0)
        samples = np.tile(round_of_samples, repeats)
        with self.engine.loss_scale_times(repeats / REPEATS):
            accumulate_gradients(self.engine, self.dataset, samples, size, StopRequest(), (self.config.seed, 0))
            pieces = gradient_boxes(self.engine)
            self.engine.discard()
        return pieces

    def overflow(self, at: int) -> OverflowSeen:
        """One update in which the first parameter's gradient on rank ``at`` holds an infinity. All ranks call it."""
        before = self.everything()
        handles = []
        if self.engine.mesh.rank == at:
            handles = [next(self.engine.model.parameters()).register_hook(with_infinity)]
        row = self.step(None).row
        for handle in handles:
            handle.remove()
        unchanged = all(map(torch.equal, before, self.everything()))
        return OverflowSeen(at, bool(row.get("skipped")), self.engine.loss_scale, unchanged)

    def buffers(self) -> dict[str, Tensor]:
        """Copies of this rank's router biases."""
        return {name: buffer.detach().cpu().clone() for name, buffer in self.engine.model.named_buffers()}

    def everything(self) -> list[Tensor]:
        """Copies of this rank's weights and optimizer states."""
        engine = self.engine
        return [piece.clone() for fragment in engine.fragments for piece in engine.pieces(fragment).values()]

    def load(self, directory: Path) -> None:
        """Loads a checkpoint, after a return to step 0's weights, so that nothing is right before it is loaded."""
        self.engine.initialize_weights(self.config.seed)
        checkpoint = open_checkpoint(directory)
        load_state(self.engine, checkpoint)
        self.state = replace(self.state, step=checkpoint.step, consumed=checkpoint.manifest.scalars["consumed"])


def hash_row(batch: Batch, row: int) -> str:
    """A hash of one sample's tokens, targets, positions and documents."""
    digest = xxhash.xxh3_64()
    for array in (batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS):
        digest.update(array[row].tobytes())
    return digest.hexdigest()


def same_tensor(first: Tensor | None, second: Tensor | None) -> bool:
    """Equal bit for bit, or both missing."""
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def with_infinity(gradient: Tensor) -> Tensor:
    """A copy of the gradient whose first element is infinite."""
    gradient = gradient.clone()
    gradient.view(-1)[0] = float("inf")
    return gradient
