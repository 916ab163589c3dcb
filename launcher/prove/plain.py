"""The plain side of a proof: the same steps on one process, without DeepSpeed or any of the parallel code."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset
from data.order import take
from launcher.prove.compare.outputs import record_outputs
from launcher.prove.compare.routing import StepChoices, record_choices
from launcher.prove.reference import PlainBatch, ReferenceStep, ReferenceTrainer
from launcher.training.batch_ramp import Batches
from modeling.config import ModelConfig
from modeling.context import PADDING, Context
from modeling.loss import IGNORE
from modeling.optimizers.config import OptimizerConfig
from modeling.precision_config import Precision
from modeling.schedules import ConstantSchedule, ScheduleConfig, lr_factor

CONSTANT = ConstantSchedule()
FIRST_LOSS_SCALE = 2.0**16  # where DeepSpeed's dynamic loss scale starts


@dataclass
class PlainState:
    """What a checkpoint holds: master weights, optimizer states, router biases, and the number of updates made."""

    weights: dict[str, Tensor]  # the fp32 masters
    states: dict[str, dict[str, Tensor]]  # kind -> name -> tensor
    buffers: dict[str, Tensor]
    updates: int


@dataclass
class HeldoutSeen:
    """One evaluation: the held-out loss, and the routers' choices in it."""

    loss: float
    choices: StepChoices


@dataclass
class PlainRun:
    """What one process computed, step by step."""

    steps: list[ReferenceStep] = field(default_factory=list)
    heldout: dict[int, HeldoutSeen] = field(default_factory=dict)  # number of steps before the evaluation -> result
    choices: list[StepChoices] = field(default_factory=list)
    states: list[PlainState] = field(default_factory=list)  # before the first step, and after each
    outputs: dict[str, Tensor] = field(default_factory=dict)  # of the modules in the first step: (N, S, D)
    valid_NS: Tensor | None = None  # where the first step's tokens are not padding


class PlainTrainer:
    """Training on one process from samples given by number, with the whole global batch as one micro-batch.

    Each step is computed by ``launcher.prove.reference.ReferenceTrainer``; ``run`` collects what was seen.
    """

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        dataset: Dataset,
        *,
        seed: int,
        precision: Precision = "fp32",
        schedule: ScheduleConfig = CONSTANT,
        done: int = 0,
    ) -> None:
        """``schedule`` gives each step its learning rate; ``done`` is the number of steps that count as made before."""
        loss_scale = first_loss_scale(precision)
        self.trainer = ReferenceTrainer(model, optimizer, seed=seed, precision=precision, loss_scale=loss_scale)
        self.lr = optimizer.lr
        self.schedule = schedule
        self.done = done
        self.dataset = dataset
        self.run = PlainRun(states=[self.state()])
        self.valid_NS = torch.empty(0)
        self.choosing = StepChoices([])
        record_choices(self.trainer.model, lambda: self.choosing, lambda: self.valid_NS)

    def step(self, samples: np.ndarray, replay: StepChoices | None = None) -> ReferenceStep:
        """One update from these samples. ``replay`` are choices of experts that the routers have to make."""
        micro_batch = self.read(self.dataset, samples)
        self.run.choices.append(self.choosing)
        choices = None if replay is None else [replay.for_tokens(self.valid_NS)]
        end = record_outputs(self.trainer.model, self.run.outputs.__setitem__) if not self.run.steps else None
        lr = self.next_lr()
        seen = self.trainer.step([micro_batch], lr, choices, self.done)
        if end is not None:
            end()
            self.run.valid_NS = self.valid_NS
        if seen.skipped and seen.has_targets:
            self.trainer.loss_scale /= 2
        self.run.steps.append(seen)
        self.run.states.append(self.state())
        return seen

    def next_lr(self) -> float:
        """The learning rate of the next step, which is counted as begun by this call."""
        self.done += 1
        assert isinstance(self.schedule, ConstantSchedule)  # others depend on how many steps a run has
        return self.lr * lr_factor(self.schedule, self.done, self.done)

    @torch.no_grad()
    def evaluate(self, heldout: Dataset, n_sequences: int, replay: StepChoices | None = None) -> HeldoutSeen:
        """The mean cross-entropy over the first ``n_sequences`` held-out samples, in one pass; 0 without targets."""
        batch = self.read(heldout, np.arange(n_sequences))
        context = Context(batch.positions_BS, batch.documents_BS, has_padding=not bool(self.valid_NS.all()))
        if replay is not None:
            context.choices = replay.for_tokens(self.valid_NS)
        loss = self.trainer.model(batch.tokens_BS, context, batch.targets_BS).loss
        seen = HeldoutSeen(float(loss) / max(1, int((batch.targets_BS != IGNORE).sum())), self.choosing)
        self.run.heldout[len(self.run.steps)] = seen
        return seen

    def read(self, dataset: Dataset, samples: np.ndarray) -> PlainBatch:
        """The samples as one micro-batch. From this call on, what routers choose is recorded as choices for them."""
        batch = dataset.read(samples)
        arrays = (batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS)
        numbers = torch.from_numpy(samples.astype(np.int64))
        micro_batch = PlainBatch(*(torch.from_numpy(array) for array in arrays), samples_B=numbers)
        self.valid_NS = micro_batch.documents_BS != PADDING
        self.choosing = StepChoices(samples.tolist())
        return micro_batch

    def state(self) -> PlainState:
        """A copy of everything a checkpoint holds."""
        kinds: dict[str, dict[str, Tensor]] = {}
        updates = 0
        for name, state in self.trainer.state().items():
            for kind, value in state.items():
                if kind == "step":
                    updates = int(value)
                elif isinstance(value, Tensor):
                    kinds.setdefault(kind, {})[name] = value.detach().clone()
        weights = {name: master.detach().clone() for name, master in self.trainer.masters.items()}
        buffers = {name: buffer.clone() for name, buffer in self.trainer.model.named_buffers()}
        return PlainState(weights, kinds, buffers, updates)

    @torch.no_grad()
    def load(self, state: PlainState) -> None:
        """Sets the weights, router biases and optimizer states to ``state``'s; those that it lacks start at zero."""
        trainer = self.trainer
        for name, weight in trainer.model.named_parameters():
            trainer.masters[name].copy_(state.weights[name])
            weight.copy_(state.weights[name])
        for name, buffer in trainer.model.named_buffers():
            buffer.copy_(state.buffers[name])
        trainer.optimizer.state.clear()
        for name, master in trainer.masters.items():
            own = {kind: tensors[name].clone() for kind, tensors in state.states.items() if name in tensors}
            if own and trainer.rule.counts_updates:
                own["step"] = torch.tensor(float(state.updates))
            if own:
                trainer.optimizer.state[master] = own


def run_plain(
    trainer: PlainTrainer, steps: int, batches: Batches, heldout: Dataset, n_sequences: int, evaluated: Collection[int]
) -> PlainRun:
    """The run of ``steps`` updates from sample 0 on, with an evaluation after each number of steps in ``evaluated``."""
    for step in range(steps + 1):
        if step in evaluated:
            trainer.evaluate(heldout, n_sequences)
        if step < steps:
            trainer.step(samples_of_step(step, batches))
    return trainer.run


def first_loss_scale(precision: Precision) -> float:
    """What the loss is multiplied by in the first step."""
    return FIRST_LOSS_SCALE if precision == "fp16" else 1.0


def samples_of_step(step: int, batches: Batches) -> np.ndarray:
    """The sample numbers of step ``step`` (from 0)."""
    return take(batches.samples_in(step), batches.size_at(step + 1))


def apply_gradients(
    trainer: PlainTrainer, start: PlainState, gradients: Sequence[Mapping[str, Tensor] | None]
) -> dict[str, Tensor]:
    """The weights that the plain optimizer makes from ``start`` of given gradients: one set a step, None if skipped."""
    trainer.load(start)
    model = trainer.trainer
    no_counts = {layer: torch.zeros(1) for layer in model.config.all_layers}  # leave router biases alone
    for step_gradients in gradients:
        lr = trainer.next_lr()
        if step_gradients is not None:
            seen = ReferenceStep(0.0, {}, {}, 0.0, dict(step_gradients), no_counts, skipped=False)
            model.update(seen, lr)
    return {name: master.detach().clone() for name, master in model.masters.items()}
