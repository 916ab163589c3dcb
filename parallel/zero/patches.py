"""All changes to DeepSpeed: subclasses of a few classes of its, and new values for a few names in its modules.

The fork server imports this module, so that no rank waits for it, and it must come before any use of DeepSpeed. No
method of DeepSpeed's is rebound. tests/multiprocess/test_deepspeed_room.py runs an engine of each kind and checks that
DeepSpeed calls every change.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import parallel.zero.quiet  # noqa: F401  (before all else of DeepSpeed)

# isort: split

import deepspeed.ops
import deepspeed.runtime.engine
import deepspeed.runtime.superoffload.superoffload_stage3  # before a class that it inherits from is replaced
import deepspeed.utils
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.moe.layer import MoE
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator, stage3
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from parallel.processes.device import own_device
from parallel.zero.accumulation import PLAIN, Accumulation

warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def print_nothing(*_: Any, **__: Any) -> None:
    """Replaces a memory report that BF16_Optimizer prints on every rank, whatever the logger's level."""


def check_nothing(*_: Any, **__: Any) -> None:
    """Replaces a check of ZeRO 3's that broadcasts over all ranks.

    The stages of a pipeline reach it at different times, and would wait for each other for ever.
    """


class OrderedGathers(PartitionedParameterCoordinator):
    """DeepSpeed's coordinator of ZeRO 3, which gathers from several process groups in the same order on all ranks.

    DeepSpeed itself collects the weights to gather in a set, whose order follows from their addresses, and gathers them
    group by group as the groups come in it. So of experts and dense weights, which have groups of their own, one rank
    would begin with the former and another with the latter, an order in which NCCL may wait for ever.
    """

    def _PartitionedParameterCoordinator__all_gather_params(self, params: Iterable[Any], forward: bool) -> None:
        """Begins gathering the weights, in the order in which they were made."""
        gather = super()._PartitionedParameterCoordinator__all_gather_params  # pyright: ignore[reportAttributeAccessIssue]
        gather(sorted(params, key=lambda weight: weight.ds_id), forward)


parameter_offload.PartitionedParameterCoordinator = OrderedGathers
bf16_optimizer.see_memory_usage = print_nothing
partitioned_param_coordinator.assert_ints_same_as_other_ranks = check_nothing
# Which optional operators can be built: set before DeepSpeed finds out, since it would run compilers for each, on each
# rank; the only one that it then builds (a CPU collective) takes 72 s, and none is needed.
deepspeed.ops.__compatible_ops__ = {}  # pyright: ignore[reportAttributeAccessIssue]


class SlowFp16(CPU_Accelerator):
    """DeepSpeed's CPU accelerator with fp16 always allowed: without fp16 instructions it is slow, but not wrong."""

    def is_fp16_supported(self) -> bool:
        """Always true."""
        return True


class OwnGpu(CUDA_Accelerator):
    """DeepSpeed's CUDA accelerator, which asks the device itself how much memory is free.

    With pynvml installed, DeepSpeed's own asks the driver by the numbers in CUDA_VISIBLE_DEVICES, which may be UUIDs.
    """

    def available_memory(self, device_index: int | None = None) -> int:
        """The free memory in bytes of the rank's GPU, or of the one with that number."""
        return torch.cuda.mem_get_info(device_index)[0]


def in_place_of(accelerator: Any) -> Any:
    """Roundtable's subclass of this accelerator, if it has one; else the accelerator itself."""
    changed = {CPU_Accelerator: SlowFp16, CUDA_Accelerator: OwnGpu}.get(type(accelerator))
    return accelerator if changed is None else changed()


set_accelerator(in_place_of(get_accelerator()))


class GivenNorm:
    """A mixin for a ZeRO optimizer: the gradient norm is given before each step, instead of computed by DeepSpeed.

    DeepSpeed's own computation runs a collective for each group of parameters, which hangs where a pipeline's stages
    have different groups. A norm that is not finite makes the step drop the gradients: weights and states stay as they
    are.
    """

    given_norm: Tensor | None = None  # of gradients as they are held: fp32 scalar on the host
    is_norm_taken = False

    def take_norm(self) -> Tensor:
        """The norm of this step; records that DeepSpeed has asked for it."""
        assert self.given_norm is not None, "a step without a norm"
        self.is_norm_taken = True
        return self.given_norm


class LateLossScale:
    """A mixin for a ZeRO optimizer: its step keeps fp16's loss scale, which ``parallel.zero.loss_scale`` changes later.

    DeepSpeed changes the scale before it divides the gradients by it, so gradients would be halved in a step in which
    it doubles. In fp16 gradients, which are averaged over ``averaged_over`` ranks, are divided by that share of it.
    """

    averaged_over = 1
    loss_scaler: Any

    @property
    def loss_scale(self) -> float:
        """What DeepSpeed's step divides gradients by."""
        return self.loss_scaler.cur_scale / self.averaged_over

    def _update_scale(self, has_overflow: bool = False) -> None:
        pass


class ZeroOptimizer12(LateLossScale, GivenNorm, DeepSpeedZeroOptimizer):
    """DeepSpeed's optimizer of ZeRO 1 and 2, with the norm given and the loss scale changed afterwards."""

    def scaled_global_norm(self, *_: Any, **__: Any) -> Tensor:
        """The norm by which the step clips: the given one."""
        return self.take_norm()


class ZeroOptimizer1GivenSums(ZeroOptimizer12):
    """DeepSpeed's ZeRO 1 without its own sums of gradients: once a step it gets this rank's part of Roundtable's."""

    def create_gradient_handling_hooks(self) -> None:
        """Makes no hooks: ``parallel.zero.scattered`` registers its own with autograd."""

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Does nothing: a gradient that is not finite makes the norm so, which the step then checks on every rank."""


class ZeroOptimizer3(LateLossScale, GivenNorm, DeepSpeedZeroOptimizer_Stage3):
    """DeepSpeed's optimizer of ZeRO 3, with the norm given and the loss scale changed afterwards."""

    def _get_norm_groups(self) -> list[Tensor]:
        return [self.take_norm()]


class Bf16Optimizer(GivenNorm, BF16_Optimizer):
    """DeepSpeed's optimizer of ZeRO 1 in bf16, with the norm given.

    Its step calls functions of its module for norms, which are replaced during the step. A step's first gradient of a
    weight overwrites its sum; DeepSpeed itself would add it to zeros, which it would have to write first.
    """

    accumulation: Accumulation = PLAIN

    def _update_hp_grad(self, lp: Any, group_idx: int, param_idx: int, clear_lp_grads: bool) -> None:
        """Adds a weight's gradient to its fp32 sum, or overwrites the sum with the step's first gradient."""
        if lp.grad is None:
            return
        total = self.fp32_groups_gradients[group_idx][param_idx]
        if self.fp32_groups_has_gradients[group_idx][param_idx]:
            self.accumulation.add(total, lp.grad.detach().view(-1))
        else:
            self.accumulation.write(total, lp.grad.detach().view(-1))
        lp._hp_grad = total
        self.fp32_groups_has_gradients[group_idx][param_idx] = True
        if clear_lp_grads:
            lp.grad.zero_()

    def clear_hp_grads(self) -> None:
        """Marks all sums as begun anew: each keeps its old values until the first gradient overwrites them."""
        for group, gradients in enumerate(self.fp32_groups_gradients):
            self.fp32_groups_has_gradients[group] = [False] * len(gradients)

    def step(self, closure: Any = None) -> None:
        """Makes one update, clipped by the given norm."""
        with replaced(
            bf16_optimizer,
            get_global_norm_of_tensors=self.norm_of_dense,
            get_norm_with_moe_layers=self.norm_with_experts,
        ):
            super().step(closure)

    def norm_of_dense(self, **_: Any) -> Tensor:
        """The given norm of all gradients, where DeepSpeed would compute that of the dense ones."""
        return self.take_norm()

    def norm_with_experts(self, norm: Tensor, **_: Any) -> Tensor:
        """``norm`` unchanged: it came from ``norm_of_dense``, and includes the experts' gradients already."""
        return norm


# For each optimizer class above: the module in which DeepSpeed looks for its own class, and under which name.
LOOKED_UP: dict[type, tuple[Any, str]] = {
    ZeroOptimizer12: (deepspeed.runtime.engine, "DeepSpeedZeroOptimizer"),
    ZeroOptimizer1GivenSums: (deepspeed.runtime.engine, "DeepSpeedZeroOptimizer"),
    Bf16Optimizer: (deepspeed.runtime.engine, "BF16_Optimizer"),
    ZeroOptimizer3: (stage3, "DeepSpeedZeroOptimizer_Stage3"),
}


class ExpertsAreHere(MoE):
    """A module without weights that makes DeepSpeed's engine treat a model as one with experts (ZeRO 1 and 2)."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 1  # DeepSpeed reads it, but uses it only for its own checkpoints

    def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
        """Does nothing: ``parallel.zero.groups`` registers the experts' groups."""


@contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    """While entered, names of a module have other values. The module must have these names."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def in_place_of_local_rank(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make``, called with LOCAL_RANK set to the number of the rank's device, as DeepSpeed expects.

    The two differ where a rank sees only its own GPU (``parallel.processes.device``).
    """
    device = own_device()

    def made(**options: Any) -> Any:
        local_rank = os.environ["LOCAL_RANK"]
        os.environ["LOCAL_RANK"] = local_rank if device.index is None else str(device.index)
        try:
            return make(**options)
        finally:
            os.environ["LOCAL_RANK"] = local_rank

    return made


def initialize(optimizer_class: type | None, shows_experts: bool, model: nn.Module, **options: Any) -> Any:
    """DeepSpeed's engine around the model, with an optimizer of ``optimizer_class``. All ranks call it.

    DeepSpeed looks up its optimizer class by name, so ``optimizer_class`` has that name during the call. None:
    DeepSpeed does not wrap torch's optimizer (ZeRO 0). ``shows_experts``: a temporary module shows DeepSpeed that the
    model has experts.
    """
    make = in_place_of_local_rank(deepspeed.initialize)
    if shows_experts:
        model.add_module("experts_are_here", ExpertsAreHere())
    if optimizer_class is None:
        engine, *_ = make(model=model, **options)
    else:
        module, name = LOOKED_UP[optimizer_class]
        with replaced(module, **{name: optimizer_class}):
            engine, *_ = make(model=model, **options)
        assert type(engine.optimizer) is optimizer_class, f"DeepSpeed did not make its optimizer by {name}"
    if shows_experts:
        del model.experts_are_here
        assert engine.has_moe_layers, "DeepSpeed did not see that the model has experts"
    return engine
