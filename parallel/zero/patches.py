"""All that is changed in DeepSpeed: subclasses of its optimizers, and the few of its names that are given other values.

Imported by the fork server, so that no rank waits for it, and before any use of DeepSpeed. Nothing of it is a rebound
method. tests/multiprocess/test_deepspeed_room.py runs an engine of each kind and sees that DeepSpeed calls all of it.
"""

import os
import warnings
from collections.abc import Callable, Iterator
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
from deepspeed.runtime.zero import partitioned_param_coordinator, stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from parallel.processes.device import own_device
from parallel.zero.accumulation import PLAIN, Accumulation

warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def print_nothing(*_: Any, **__: Any) -> None:
    """In place of a report of memory, which BF16_Optimizer prints on every rank, whatever the logger's level."""


def check_nothing(*_: Any, **__: Any) -> None:
    """In place of a check of ZeRO 3's that broadcasts over the world.

    The stages of a pipeline come to it at different times and would wait for each other without end.
    """


bf16_optimizer.see_memory_usage = print_nothing
partitioned_param_coordinator.assert_ints_same_as_other_ranks = check_nothing
# Which optional operators can be built: told before DeepSpeed asks, since it would run compilers for each, on each
# rank; the only one that it then builds (a CPU collective) takes 72 s, and none is needed.
deepspeed.ops.__compatible_ops__ = {}  # pyright: ignore[reportAttributeAccessIssue]


class SlowFp16(CPU_Accelerator):
    """CPUs, with fp16 allowed on all of them: where the processor has no fp16 products it is slow, not wrong."""

    def is_fp16_supported(self) -> bool:
        """Always true."""
        return True


class OwnGpu(CUDA_Accelerator):
    """GPUs, of which the device itself tells how much memory is free.

    Where pynvml is installed DeepSpeed asks the driver by the numbers in CUDA_VISIBLE_DEVICES, where UUIDs may stand.
    """

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of the rank's GPU, or of the one of that number, that nobody has."""
        return torch.cuda.mem_get_info(device_index)[0]


def in_place_of(accelerator: Any) -> Any:
    """Ours, where it is one that we change."""
    changed = {CPU_Accelerator: SlowFp16, CUDA_Accelerator: OwnGpu}.get(type(accelerator))
    return accelerator if changed is None else changed()


set_accelerator(in_place_of(get_accelerator()))


class GivenNorm:
    """Of a ZeRO optimizer: the gradient norm is given before each step, not computed by DeepSpeed.

    DeepSpeed's own runs a collective for each group of parameters, which hangs where a pipeline's stages have different
    groups. A norm that is not finite makes the step drop the gradients: weights and states stay as they are.
    """

    given_norm: Tensor | None = None  # fp32 scalar on the host, loss scale included
    is_norm_taken = False

    def take_norm(self) -> Tensor:
        """The norm of this step."""
        assert self.given_norm is not None, "a step without a norm"
        self.is_norm_taken = True
        return self.given_norm


class LateLossScale:
    """Of a ZeRO optimizer: its step leaves fp16's loss scale alone; ``parallel.zero.loss_scale`` moves it afterwards.

    DeepSpeed moves it before it divides the gradients by it, so in the step where it doubles they come out halved.
    """

    def _update_scale(self, has_overflow: bool = False) -> None:
        pass


class ZeroOptimizer12(LateLossScale, GivenNorm, DeepSpeedZeroOptimizer):
    """DeepSpeed's ZeRO 1 and 2."""

    def scaled_global_norm(self, *_: Any, **__: Any) -> Tensor:
        """What the step clips by."""
        return self.take_norm()


class ZeroOptimizer1GivenSums(ZeroOptimizer12):
    """DeepSpeed's ZeRO 1 without its sums of gradients: it is given this rank's part of ours, once a step."""

    def create_gradient_handling_hooks(self) -> None:
        """None: ``parallel.zero.scattered`` has autograd's hooks."""

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Nothing: a number that is not finite makes the norm so, which the step looks at next, on every rank alike."""


class ZeroOptimizer3(LateLossScale, GivenNorm, DeepSpeedZeroOptimizer_Stage3):
    """DeepSpeed's ZeRO 3."""

    def _get_norm_groups(self) -> list[Tensor]:
        return [self.take_norm()]


class Bf16Optimizer(GivenNorm, BF16_Optimizer):
    """DeepSpeed's ZeRO 1 in bf16. Its step takes norms from functions of its module, which are replaced meanwhile.

    A step's first gradient of a weight is written over what the sum held; DeepSpeed adds it to zeros, which it has to
    write first.
    """

    accumulation: Accumulation = PLAIN

    def _update_hp_grad(self, lp: Any, group_idx: int, param_idx: int, clear_lp_grads: bool) -> None:
        """Takes a weight's gradient into its fp32 sum."""
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
        """Begins new sums. What the old ones hold stays until then."""
        for group, gradients in enumerate(self.fp32_groups_gradients):
            self.fp32_groups_has_gradients[group] = [False] * len(gradients)

    def step(self, closure: Any = None) -> None:
        """Makes one update, clipped by our norm."""
        with replaced(
            bf16_optimizer,
            get_global_norm_of_tensors=self.norm_of_dense,
            get_norm_with_moe_layers=self.norm_with_experts,
        ):
            super().step(closure)

    def norm_of_dense(self, **_: Any) -> Tensor:
        """The norm of all gradients, where DeepSpeed asks for that of the dense ones."""
        return self.take_norm()

    def norm_with_experts(self, norm: Tensor, **_: Any) -> Tensor:
        """``norm`` as it is: ``norm_of_dense`` has given that of all gradients, the experts' included."""
        return norm


# For each of our optimizers: the module in which DeepSpeed looks for its own, and under which name.
LOOKED_UP: dict[type, tuple[Any, str]] = {
    ZeroOptimizer12: (deepspeed.runtime.engine, "DeepSpeedZeroOptimizer"),
    ZeroOptimizer1GivenSums: (deepspeed.runtime.engine, "DeepSpeedZeroOptimizer"),
    Bf16Optimizer: (deepspeed.runtime.engine, "BF16_Optimizer"),
    ZeroOptimizer3: (stage3, "DeepSpeedZeroOptimizer_Stage3"),
}


class ExpertsAreHere(MoE):
    """A module without weights by which DeepSpeed's engine notices that a model has experts (ZeRO 1 and 2)."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 1  # read, and used for checkpoints of DeepSpeed's own only

    def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
        """Nothing: the experts' groups are registered by ``parallel.zero.groups``."""


@contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    """Other values of a module's names for a while. The module must have the names."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def in_place_of_local_rank(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make`` with LOCAL_RANK being the device's number, which is what DeepSpeed takes it for.

    It is another where a rank sees its own GPU alone (``parallel.processes.device``).
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

    DeepSpeed makes its optimizer by name and takes no class for it, so ours bears that name meanwhile. None: DeepSpeed
    wraps the optimizer in none of its own (ZeRO 0). ``shows_experts``: a module shows that the model has experts.
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
