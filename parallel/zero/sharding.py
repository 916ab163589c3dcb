"""The interface to the engine of every way in which DeepSpeed shards a model's state over ranks (ZeRO 0 to 3).

Between two steps a rank holds weights in the model's dtype, fp32 masters and optimizer states; during a step, gradients
too. For each way one subclass knows which part of each a rank holds, and under which of DeepSpeed's names.
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
HeldGradient = tuple[nn.Parameter, Tensor, int]  # a weight, this rank's part of its gradient, how many ranks hold that


class Sharding(ABC):
    """One way of sharding weights, gradients and optimizer state over the ranks that replicate a weight.

    It is made before the model; ``adopt`` then takes each weight as it is made, and ``open`` the whole model. A step is
    ``backward`` for each micro-batch, or passes inside ``collect``, after which the gradients are reduced and averaged
    over the ranks that replicate dense weights; then ``step`` or ``drop``. All ranks call all of them.
    """

    stage: ClassVar[int]  # DeepSpeed's ZeRO stage
    clips: ClassVar = True  # whether DeepSpeed clips gradients; else ``step`` does
    shows_experts: ClassVar = True  # whether a module of DeepSpeed's own class must show it that there are experts
    # Whether backward passes communicate, in the order of the graph, which therefore has to be the same on all ranks.
    needs_equal_graphs: ClassVar = False
    weights_stay: ClassVar = True  # whether weights stay in memory from the forward to the backward pass
    rounds_sums: ClassVar = False  # whether DeepSpeed is given a pipeline's fp32 sums in the weights' dtype
    masters_on_host: ClassVar = (
        False  # whether masters, optimizer states and reduced gradients are in the host's memory
    )
    zeroes_sums: ClassVar = True  # whether sums of gradients are zeroed before a step's first gradients are added
    sums_here: ClassVar = False  # whether Roundtable sums the gradients, not DeepSpeed
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
        """``accumulation``: how gradients are added to fp32 sums that are not DeepSpeed's own."""
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
        """Marks a weight that was just made with the attributes that DeepSpeed reads, before it gets the model."""
        mark_parameter(parameter, place, self.mesh)

    def cut_groups(
        self, groups: list[Group], stages: Sequence[Collection[nn.Parameter]], tied: nn.Parameter | None
    ) -> list[Group]:
        """The optimizer's groups, each of which DeepSpeed keeps as one flat tensor; unchanged here.

        Subclasses may divide them. ``stages``: the weights of each of this rank's pipeline stages. ``tied``: the weight
        of which another rank holds a copy.
        """
        return groups

    def open(self, model: Decoder, base: torch.optim.Optimizer, weights: Mapping[nn.Parameter, HeldWeight]) -> None:
        """Hands the model and its torch optimizer to DeepSpeed. All ranks call it."""
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
        self.deepspeed.enable_backward_allreduce = False  # Roundtable decides when gradients are reduced
        self.optimizer: Any = self.deepspeed.optimizer
        is_fp16, replicas = self.dtype == torch.float16, self.mesh.replicas.degree
        self.loss_scale = LossScale(self.optimizer.loss_scaler if is_fp16 else None, replicas)
        if is_fp16:
            self.optimizer.averaged_over = replicas

    @abstractmethod
    def optimizer_class(self) -> type | None:
        """The class of DeepSpeed's optimizer, from ``parallel.zero.patches``; None: torch's own is not wrapped."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """One micro-batch's backward pass; ``last`` marks the step's final one."""
        self.deepspeed.set_gradient_accumulation_boundary(False)
        torch.autograd.backward(loss)
        if last:
            self.reduce_all()

    def reduce_all(self) -> None:
        """Averages the summed gradients over the replicas, by one call of DeepSpeed's. All ranks call it."""
        self.deepspeed.set_gradient_accumulation_boundary(True)
        self.deepspeed.allreduce_gradients(self.bucket)

    @contextmanager
    def collect(self, finish: Callable[[], None]) -> Iterator[None]:
        """Around one step's passes under a pipeline, in place of ``backward``: on leaving, gradients are reduced.

        Inside it, ``after_backward`` must be called after each micro-batch's backward pass through a stage. ``finish``
        is called when the sums are complete, while ``total`` may still be changed (for tied weights).
        """
        self.deepspeed.set_gradient_accumulation_boundary(False)
        yield
        finish()
        self.reduce_all()

    def after_backward(self, stage: nn.Module) -> None:
        """Takes one micro-batch's gradients of a stage's weights, inside ``collect``; in fp32 autograd sums them."""
        assert self.dtype == torch.float32, "sums in 16 bits lose what is small"

    def total(self, weight: nn.Parameter) -> Tensor:
        """The tensor with a weight's summed gradient, which ``collect``'s ``finish`` may change in place."""
        assert weight.grad is not None, "every weight takes part in every backward pass"
        return weight.grad

    @abstractmethod
    def gradients(self) -> list[HeldGradient]:
        """This rank's parts of the reduced gradients, with ``loss_scale.in_gradients``: writable, for ``step``."""

    @abstractmethod
    def flat_gradient(self, flat: Tensor) -> Tensor:
        """The gradient of a tensor that the optimizer updates, as a flat fp32 tensor in the same layout."""

    @abstractmethod
    def share_of(self, weight: HeldWeight) -> Share | None:
        """The weight's elements whose fp32 master this rank holds, and where it lies; None where it holds none."""

    @abstractmethod
    def flats(self) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """The fp32 tensors that torch's optimizer updates, each with the weights whose elements are divided over it.

        Every rank has as many, in the same order. This rank's tensor may have no element of some of the weights.
        """

    def updated(self) -> list[tuple[Tensor, Weight]]:
        """The fp32 tensors that torch's optimizer updates on this rank, each with the Weight of one tensor in it."""
        return [(flat, self.weights[parameters[0]].weight) for flat, parameters in self.flats()]

    def matrices(self, rule: UpdateRule) -> Matrices:
        """The object that gathers whole matrices for a rule whose updates need them (Muon). All ranks call it."""
        taken = [
            (flat, [(self.weights[parameter], self.share_of(self.weights[parameter])) for parameter in parameters])
            for flat, parameters in self.flats()
            if rule.takes_whole(self.weights[parameters[0]].weight)
        ]
        return DealtMatrices(taken, self.cut_matrices())

    def cut_matrices(self) -> CutMatrices:
        """The object that gathers the matrices that tp cuts."""
        return CutMatrices(
            {parameter: weight.place for parameter, weight in self.weights.items()}, self.mesh.tp, self.at_once
        )

    def step(self, norm: Tensor) -> bool:
        """Clips by ``norm`` and applies the gradients, or drops them if it is not finite; returns whether it dropped.

        ``norm`` is the norm of all gradients as they are held: the same fp32 scalar on every rank's host.
        """
        skipped = self.run_step(norm)
        self.loss_scale.after_step(skipped)
        return skipped

    def drop(self) -> None:
        """Drops the gradients: weights, optimizer states and loss scale stay, bit for bit."""
        skipped = self.run_step(torch.tensor(torch.nan))
        assert skipped, "DeepSpeed applied gradients whose norm is not a number"

    def run_step(self, norm: Tensor) -> bool:
        """DeepSpeed's step with this norm; returns whether it dropped the gradients, as it does after an overflow."""
        optimizer = self.optimizer
        optimizer.given_norm, optimizer.is_norm_taken = norm, False
        self.deepspeed.set_gradient_accumulation_boundary(True)
        self.deepspeed.step()
        skipped = bool(optimizer.overflow)
        assert skipped or optimizer.is_norm_taken, "DeepSpeed did not take the norm that was given to it"
        return skipped

    @abstractmethod
    def publish(self, rule: UpdateRule) -> None:
        """Copies the masters, whose fragments each rank has written, into the weights of all ranks that hold them.

        Where replicas hold the same masters and states whole, these are completed from all ranks' fragments too.
        """

    def kept(self, parameter: nn.Parameter) -> Tensor:
        """The part of a weight that this rank keeps between steps, in the model's dtype."""
        return parameter.detach()
