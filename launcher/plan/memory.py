"""The bytes of training state that a rank holds, from the config and the layout alone.

Only what stays from one micro-batch to the next is counted; tests compare it with the tensors of running engines. Not
counted are activations, one micro-batch's gradients in 16 bits, weights that ZeRO 3 gathers for a while, and
communication buffers, of which DeepSpeed's largest, for reducing gradients, takes up to REDUCTION_BYTES.
"""

import math
from dataclasses import dataclass

from launcher.closed_form.memory import CUT
from launcher.traffic.step import FP32_BYTES, Step
from launcher.traffic.zero import flat_elements, optimizer_groups, padded, replicated
from parallel.sizes import DEFAULT_SIZES

REDUCTION_BYTES = DEFAULT_SIZES.bucket * FP32_BYTES


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank's training state by part. Masters are 0 where the optimizer updates the weights themselves."""

    weights: int  # in the forward pass's dtype, and in 8 bits too where that copy is kept (train.fp8_keep_weights)
    masters: int  # the fp32 weights that the optimizer updates
    optimizer: int  # its states, fp32
    gradients: int  # fp32 sums over the micro-batches
    host: int = 0  # in the host's memory: offloaded masters and optimizer states, and the gradients for them

    @property
    def total(self) -> int:
        """The bytes of all parts in the device's memory, so without ``host``."""
        return self.weights + self.masters + self.optimizer + self.gradients


def rank_memory(step: Step) -> Memory:
    """The training state of each rank at the step's pipeline position, the same for all its dp, cp, tp and ep ranks."""
    whole = sum(step.weights.values())
    share = sum(_share(step, n, names) for _, n, names in replicated(step))
    weights = step.element_bytes * _weight_elements(step) + cut_bytes(step)
    states = FP32_BYTES * _state_elements(step)
    if step.parallel.zero == 0:
        return Memory(weights, 0, states, FP32_BYTES * whole)
    if step.parallel.offload_optimizer:  # in fp32 DeepSpeed adds gradients up on the host
        n_summed = 0 if step.precision == "fp32" and step.parallel.pp == 1 else _gradient_elements(step, share)
        return Memory(weights, 0, 0, FP32_BYTES * n_summed, 2 * FP32_BYTES * share + states)
    return Memory(weights, FP32_BYTES * share, states, FP32_BYTES * _gradient_elements(step, share))


def cut_bytes(step: Step) -> int:
    """Bytes of the 8-bit copies of a rank's weights: one scaled by rows and one by columns, and their fp32 factors."""
    if not step.keeps_cut_weights:
        return 0
    found = 0
    for name, count in step.weights.items():
        tensor, place = step.tensors[name], step.layout[name]
        if tensor.weight.takes_8_bits:
            held = list(tensor.shape)
            if place.axis is not None and place.dim is not None:
                held[place.dim] //= getattr(step.parallel, place.axis)
            *stack, n_out, n_in = held
            found += CUT * count + FP32_BYTES * math.prod(stack) * (n_out + n_in)
    return found


def updated_elements(step: Step) -> int:
    """Elements that a rank's optimizer updates under ZeRO 1 to 3, padding included."""
    return sum(_share(step, n, names) for _, n, names in replicated(step))


def _state_elements(step: Step) -> int:
    """Elements of the optimizer's states: for whole weights under ZeRO 0, else for the part that this rank updates."""
    if step.parallel.zero == 0:
        return sum(count * len(step.states_of(name)) for name, count in step.weights.items())
    return sum(
        _share(step, n, group) * len(step.states_of(group[0]))
        for _, n, names in replicated(step)
        for group in optimizer_groups(step, names)
    )


def _share(step: Step, n: int, names: list[str]) -> int:
    """Elements of the part that one of ``n`` ranks updates, padding included."""
    if step.parallel.zero == 3:
        return sum(padded(step.weights[name], n) // n for name in names)
    return flat_elements(step, n, names) // n


def _weight_elements(step: Step) -> int:
    """Elements of weights kept for the forward pass: all (padded by ZeRO 1 and 2), or ZeRO 3's part and small ones."""
    match step.parallel.zero:
        case 0:
            return sum(step.weights.values())
        case 1 | 2:
            return sum(flat_elements(step, n, names) for _, n, names in replicated(step))
        case _:
            return sum(_share(step, n, names) + _kept_whole(step, n, names) for _, n, names in replicated(step))


def _kept_whole(step: Step, n: int, names: list[str]) -> int:
    """Elements of the small weights that ZeRO 3 keeps gathered beside its part of them; 0 on a rank that holds all."""
    small = (step.weights[name] for name in names if step.weights[name] <= DEFAULT_SIZES.persistent)
    return sum(padded(count, n) for count in small) if n > 1 else 0


def _gradient_elements(step: Step, share: int) -> int:
    """Elements of the gradients' sums over micro-batches: of this rank's part, or of all its weights.

    It is the part under ZeRO 2 and 3 without a pipeline, and wherever each micro-batch's gradients are reduced.
    """
    zero, whole = step.parallel.zero, sum(step.weights.values())
    if (zero >= 2 and step.parallel.pp == 1) or step.scatters:
        return share
    if zero == 1 and (step.precision == "bf16" or step.in_buckets):  # in one flat tensor a group
        return sum(flat_elements(step, n, names) for _, n, names in replicated(step))
    return whole
