"""The plain side of a proof: the same steps on one process, without DeepSpeed or any of the parallel code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset
from data.order import take
from modeling.config import ModelConfig
from modeling.context import PADDING
from modeling.optimizers.config import OptimizerConfig
from modeling.reference import MicroBatch, ReferenceStep, ReferenceTrainer
from parallel.compare.outputs import record_outputs
from parallel.compare.routing import StepChoices, record_choices

Precision = Literal["fp32", "bf16", "fp16"]
FIRST_LOSS_SCALE = 2.0**16  # where DeepSpeed's dynamic loss scale starts


@dataclass
class PlainState:
    """What a checkpoint holds: masters, optimizer states by kind, router biases, and how many updates were made."""

    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]  # kind -> name -> tensor
    buffers: dict[str, Tensor]
    updates: int


@dataclass
class PlainRun:
    """What one process saw, step by step."""

    steps: list[ReferenceStep] = field(default_factory=list)
    choices: list[StepChoices] = field(default_factory=list)
    states: list[PlainState] = field(default_factory=list)  # before the first step, and after each
    outputs: dict[str, Tensor] = field(default_factory=dict)  # of the modules in the first step: (N, S, D)
    valid_NS: Tensor | None = None  # the first step's real tokens


class PlainTrainer:
    """modeling.reference.ReferenceTrainer over samples by number, the whole global batch as one micro-batch."""

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        dataset: Dataset,
        *,
        seed: int,
        precision: Precision = "fp32",
    ) -> None:
        loss_scale = FIRST_LOSS_SCALE if precision == "fp16" else 1.0
        self.trainer = ReferenceTrainer(model, optimizer, seed=seed, precision=precision, loss_scale=loss_scale)
        self.lr = optimizer.lr
        self.dataset = dataset
        self.run = PlainRun(states=[self.state()])
        self.valid_NS = torch.empty(0)
        record_choices(self.trainer.model, lambda: self.run.choices[-1], lambda: self.valid_NS)

    def step(self, samples: np.ndarray, replay: StepChoices | None = None) -> ReferenceStep:
        """One update from these samples; ``replay`` makes the routers choose as they did there."""
        batch = self.dataset.read(samples)
        arrays = (batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS)
        micro_batch = MicroBatch(*(torch.from_numpy(array) for array in arrays))
        self.valid_NS = micro_batch.documents_BS != PADDING
        self.run.choices.append(StepChoices(samples.tolist()))
        choices = None if replay is None else [replay.for_tokens(self.valid_NS)]
        end = record_outputs(self.trainer.model, self.run.outputs.__setitem__) if not self.run.steps else None
        seen = self.trainer.step([micro_batch], self.lr, choices)
        if end is not None:
            end()
            self.run.valid_NS = self.valid_NS
        if seen.skipped:
            self.trainer.loss_scale /= 2
        self.run.steps.append(seen)
        self.run.states.append(self.state())
        return seen

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
        """Goes on from ``state``; optimizer states that it lacks start at zero."""
        trainer = self.trainer
        for name, weight in trainer.model.named_parameters():
            trainer.masters[name].copy_(state.weights[name])
            weight.copy_(state.weights[name])
        for name, buffer in trainer.model.named_buffers():
            buffer.copy_(state.buffers[name])
        trainer.optimizer.state.clear()
        for name, master in trainer.masters.items():
            own = {kind: tensors[name].clone() for kind, tensors in state.states.items() if name in tensors}
            if "exp_avg" in own:
                own["step"] = torch.tensor(float(state.updates))
            if own:
                trainer.optimizer.state[master] = own


def run_plain(trainer: PlainTrainer, steps: int, batch_size: int) -> PlainRun:
    """``steps`` updates from sample 0."""
    for step in range(steps):
        trainer.step(samples_of_step(step, batch_size))
    return trainer.run


def samples_of_step(step: int, batch_size: int) -> np.ndarray:
    """The sample numbers of step ``step`` (from 0)."""
    return take(step * batch_size, batch_size)


def apply_gradients(
    trainer: PlainTrainer, start: PlainState, gradients: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The weights that the plain optimizer makes of given gradients, one set a step, from ``start``."""
    trainer.load(start)
    model = trainer.trainer
    no_counts = {layer: torch.zeros(1) for layer in range(model.config.n_layers)}  # leave router biases alone
    for step_gradients in gradients:
        seen = ReferenceStep(0.0, {}, {}, 0.0, dict(step_gradients), no_counts, skipped=False)
        model.update(seen, trainer.lr)
    return {name: master.detach().clone() for name, master in model.masters.items()}
