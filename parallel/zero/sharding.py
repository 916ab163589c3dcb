"""How DeepSpeed holds a model's state: what every way of it offers to the engine.

Between two steps a rank holds weights in the model's dtype, fp32 masters and optimizer states; during a step, gradients
too. Which part of each it holds, and under which of DeepSpeed's names, is known to one class for each way alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from modeling.decoder import Decoder
from modeling.dims import Weight
from modeling.dtypes import DTYPES
from modeling.optimizers.matrices import Matrices
from modeling.optimizers.rule import UpdateRule
from modeling.precision_config import Stored
from parallel.layout import Place
from parallel.matrices import CutMatrices
from parallel.mesh import Mesh
from parallel.sizes import Sizes
from parallel.zero.accumulation import PLAIN, Accumulation
from parallel.zero.buckets import Group
from parallel.zero.fragments import Share
from parallel.zero.groups import Mpu, experts_are_separate, mark_parameter, register_expert_groups
from parallel.zero.loss_scale import LossScale
from parallel.zero.matrices import DealtMatrices
from parallel.zero.settings import deepspeed_config
from parallel.zero.weights import HeldWeight

Precision = Stored
HeldGradient = tuple[nn.Parameter, Tensor, int]  # a weight, what this rank holds of its gradient, how many ranks do


class Sharding(ABC):
    """One way of holding state. Made before the model, whose weights ``adopt`` takes one by one; then ``open``ed.

    A step is: ``backward`` for each micro-batch, or passes inside ``collect``; then the gradients are there, reduced
    and averaged over the ranks that replicate dense weights; then ``step`` or ``drop``. All ranks call all of them.
    """

    stage: ClassVar[int]  # DeepSpeed's number for it
    clips: ClassVar = True  # whether DeepSpeed clips; else ``step`` does
    shows_experts: ClassVar = True  # whether DeepSpeed learns of experts by a module of its own kind
    # Whether backward passes communicate, in the order of the graph, which therefore has to be the same on all ranks.
    needs_equal_graphs: ClassVar = False
    weights_stay: ClassVar = True  # whether a weight lies between the passes where it is during them
    rounds_sums: ClassVar = False  # whether DeepSpeed is given a pipeline's fp32 sums in the weights' dtype
    masters_on_host: ClassVar = (
        False  # whether masters, optimizer states and reduced gradients are in the host's memory
    )
    zeroes_sums: ClassVar = True  # whether sums of gradients are set to zero before a step's first are added to them
    sums_here: ClassVar = False  # whether gradients are summed by us, not by DeepSpeed
    scatters: ClassVar = False  # whether each micro-batch's gradients are reduced into sums of this rank's part alone

    def __init__(
        self,
        mesh: Mesh,
        precision: Precision,
        micro_batch_size: int,
        clip_norm: float | None,
        sizes: Sizes,
        accumulation: Accumulation = PLAIN,
    ) -> None:
        """``accumulation``: how fp32 sums that are not DeepSpeed's own take gradients."""
        import parallel.zero.patches as patches

        self.patches = patches
        self.mesh = mesh
        self.accumulation = accumulation
        self.dtype = DTYPES[precision]
        self.clip_norm = clip_norm
        self.bucket = sizes.bucket
        self.reduced = sizes.reduced
        self.at_once = sizes.matrices
        self.config = deepspeed_config(
            self.stage,
            precision,
            micro_batch_size,
            clip_norm if self.clips else None,
            sizes,
            precision if self.sums_here else "fp32",
            offload=self.masters_on_host,
            pin_memory=mesh.device.type == "cuda",
        )
        register_expert_groups(mesh)

    def adopt(self, parameter: nn.Parameter, place: Place) -> None:
        """Takes a weight that was just made, before DeepSpeed sees the model."""
        mark_parameter(parameter, place, self.mesh)

    def cut_groups(
        self, groups: list[Group], stages: Sequence[Collection[nn.Parameter]], tied: nn.Parameter | None
    ) -> list[Group]:
        """The optimizer's groups, cut further where DeepSpeed's flat tensors are to hold less; here as they are.

        ``stages`` are the weights of each of this rank's stages, ``tied`` the one of which another rank holds a copy.
        """
        return groups

    def open(self, model: Decoder, base: torch.optim.Optimizer, weights: Mapping[nn.Parameter, HeldWeight]) -> None:
        """Hands the model, and torch's optimizer of it, to DeepSpeed."""
        self.model, self.base, self.weights = model, base, weights
        has_experts = any(weight.place.is_expert for weight in weights.values())
        self.deepspeed = self.patches.initialize(
            self.optimizer_class(),
            self.shows_experts and has_experts and experts_are_separate(self.mesh),
            model,
            optimizer=base,
            config=self.config,
            mpu=Mpu(self.mesh),
            dist_init_required=False,
        )
        self.deepspeed.enable_backward_allreduce = False  # gradients are reduced when we say so
        self.optimizer: Any = self.deepspeed.optimizer
        self.loss_scale = LossScale(self.optimizer.loss_scaler if self.dtype == torch.float16 else None)

    @abstractmethod
    def optimizer_class(self) -> type | None:
        """The class of DeepSpeed's optimizer, from ``parallel.zero.patches``; None: it wraps torch's in none."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """One micro-batch's backward pass; ``last`` marks the step's final one."""
        self.deepspeed.set_gradient_accumulation_boundary(False)
        torch.autograd.backward(loss)
        if last:
            self.reduce_all()

    def reduce_all(self) -> None:
        """What has been summed is reduced now, by one call of DeepSpeed's."""
        self.deepspeed.set_gradient_accumulation_boundary(True)
        self.deepspeed.allreduce_gradients(self.bucket)

    @contextmanager
    def collect(self, finish: Callable[[], None]) -> Iterator[None]:
        """Around one step's passes, where ``backward`` is not used: on leaving, gradients are reduced.

        After each micro-batch's backward pass through a stage, ``after_backward`` is called. ``finish`` is called when
        the sums are complete and before they are reduced (tied weights).
        """
        self.deepspeed.set_gradient_accumulation_boundary(False)
        yield
        finish()
        self.reduce_all()

    def after_backward(self, stage: nn.Module) -> None:
        """Inside ``collect``: takes one micro-batch's gradients of a stage's weights. In fp32 autograd sums them."""
        assert self.dtype == torch.float32, "sums in 16 bits lose what is small"

    def total(self, weight: nn.Parameter) -> Tensor:
        """Where a weight's sum lies, to be changed in place in ``collect``'s ``finish``."""
        assert weight.grad is not None, "every weight takes part in every backward pass"
        return weight.grad

    @abstractmethod
    def gradients(self) -> list[HeldGradient]:
        """What this rank holds of the reduced gradients, loss scale included: DeepSpeed's own tensors, writable."""

    @abstractmethod
    def flat_gradient(self, flat: Tensor) -> Tensor:
        """The gradient of a tensor that the optimizer updates, laid out as it is: one flat fp32 tensor."""

    @abstractmethod
    def share_of(self, weight: HeldWeight) -> Share | None:
        """Where the elements lie of which this rank holds the fp32 master; None where it holds none of this weight."""

    @abstractmethod
    def flats(self) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """The fp32 tensors that torch's optimizer updates, each with the weights whose elements are dealt out in it.

        On every rank as many and in the same order; this rank may have none of some weight's elements.
        """

    def updated(self) -> list[tuple[Tensor, Weight]]:
        """The fp32 tensors that torch's optimizer updates on this rank, each with what one of its weights is."""
        return [(flat, self.weights[parameters[0]].weight) for flat, parameters in self.flats()]

    def matrices(self, rule: UpdateRule) -> Matrices:
        """What makes the matrices whole that the rule's updates need so."""
        taken = [
            (flat, [(self.weights[parameter], self.share_of(self.weights[parameter])) for parameter in parameters])
            for flat, parameters in self.flats()
            if rule.takes_whole(self.weights[parameters[0]].weight)
        ]
        return DealtMatrices(taken, self.cut_matrices())

    def cut_matrices(self) -> CutMatrices:
        """What makes those whole that tp cuts."""
        return CutMatrices(
            {parameter: weight.place for parameter, weight in self.weights.items()}, self.mesh.tp, self.at_once
        )

    def step(self, norm: Tensor) -> bool:
        """Clips by ``norm`` and applies the gradients, or drops them where it is not finite; whether they were dropped.

        ``norm`` is the norm of all gradients, the same fp32 scalar on every rank's host, loss scale included.
        """
        skipped = self.run_step(norm)
        self.loss_scale.after_step(skipped)
        return skipped

    def drop(self) -> None:
        """Drops the gradients: weights, optimizer states and loss scale stay, bit for bit."""
        skipped = self.run_step(torch.tensor(torch.nan))
        assert skipped, "DeepSpeed applied gradients whose norm is not a number"

    def run_step(self, norm: Tensor) -> bool:
        """DeepSpeed's step with this norm; whether the gradients were dropped, by its own way for overflows."""
        optimizer = self.optimizer
        optimizer.given_norm, optimizer.is_norm_taken = norm, False
        self.deepspeed.set_gradient_accumulation_boundary(True)
        self.deepspeed.step()
        skipped = bool(optimizer.overflow)
        assert skipped or optimizer.is_norm_taken, "DeepSpeed did not take the norm that was given to it"
        return skipped

    @abstractmethod
    def publish(self, rule: UpdateRule) -> None:
        """Brings the weights in line with the masters, of which each rank has written its fragments; so with states."""

    def kept(self, parameter: nn.Parameter) -> Tensor:
        """What this rank keeps of a weight between steps, in the model's dtype."""
        return parameter.detach()
