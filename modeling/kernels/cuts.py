"""Factors of products quantized to 8 bits (E4M3), once for each time that their values change.

E4M3 (Micikevicius et al. 2022, arXiv:2209.05433, section 3) has a sign, four bits of exponent and three of fraction.
Each row along the dim that a product sums over has its own scale, a power of two (modeling.kernels.fp8 says why).

Shape letters: R rows, I the dim that a product sums over, O its outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from modeling.kernels.fuse import Fuse, in_parts, plainly

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # E4M3's largest number, 1.75 * 2^8
LARGEST_EXPONENT = 8
LARGEST_FRACTION = 0.75
BIAS = 127  # of an fp32 number's exponent
FRACTION_BITS = 23
MOST = 120  # a scale lies within 2^-MOST and 2^MOST: it and its inverse are normal numbers
UNIT = 16  # tensor cores take rows of whole units of 16 bytes, along both dims of a factor

Cut = tuple[Tensor, Tensor]  # (..., I) in E4M3, contiguous, and fp32 factors (..., 1) that restore the numbers


def cut(numbers: Tensor) -> Cut:
    """The numbers quantized: (..., I) in E4M3, contiguous, and fp32 factors (..., 1), powers of two, that restore them.

    Rows of zeros stay zeros. The factor of a row that is not finite is NaN, and so is any product with it: E4M3 has no
    infinity, and would replace it by its largest number.
    """
    largest = numbers.abs().amax(-1, keepdim=True).float().view(torch.int32)
    exponent = (largest >> FRACTION_BITS) - BIAS
    above = (largest & ((1 << FRACTION_BITS) - 1)) > int(LARGEST_FRACTION * (1 << FRACTION_BITS))
    shift = (LARGEST_EXPONENT - exponent - above.to(torch.int32)).clamp(-MOST, MOST)
    factors = power_of_two(-shift).masked_fill(exponent == BIAS + 1, torch.nan)
    return (numbers.float() * power_of_two(shift)).to(E4M3).contiguous(), factors


@in_parts  # one part finds the largest numbers, the other quantizes
def cut_across(numbers: Tensor) -> Cut:
    """The matrices' transposes quantized: (..., I, O) into (..., O, I) in E4M3, with factors (..., O, 1)."""
    return cut(numbers.transpose(-1, -2))


@in_parts
def cut_units_across(numbers_NUI: Tensor) -> Cut:
    """The transpose quantized, of rows that come as N units (N, U, I), into (I, N * U).

    That way a compiler knows that each row of the result begins at whole units. If the number of rows varied freely it
    would store byte by byte.
    """
    return cut(numbers_NUI.flatten(0, 1).t())


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp32, exactly, from int32."""
    return ((exponent + BIAS) << FRACTION_BITS).view(torch.float32)


def put_back(numbers_8: Tensor, factors: Tensor) -> Tensor:
    """The numbers that a quantized factor stands for, in bf16, which holds them exactly."""
    return (numbers_8.float() * factors).bfloat16()


@dataclass(frozen=True)
class Identity:
    """What tells one tensor's memory from all others: equal for tensors of the same elements of the same memory.

    Values do not matter. It is never equal for another memory, even at the same address later.
    """

    memory: StorageWeakRef
    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Identity":
        """The identity of ``tensor``."""
        return cls(StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride())


class Cuts:
    """The quantized factors of a model's products: on a CPU computed plainly, elsewhere by ``fuse``.

    Rows that several products read one after another (queries, keys and values; gate and up) are quantized once, for
    the first of them. Weights are quantized in each product, or with ``keeps_weights`` in the first one after
    ``weights_changed``, and then kept: one byte an element for forward products, and one for gradients by activations.
    """

    def __init__(self, fuse: Fuse = plainly, *, keeps_weights: bool = False) -> None:
        self.fuse = fuse
        self.last, self.last_across = Last(), Last()
        self.kept: dict[tuple[Identity, bool], tuple[int, Cut]] | None = {} if keeps_weights else None
        self.n_changes = 0
        self.kept_anew: Callable[[Cut], None] = lambda made: None  # called with each new kept weight, for profiles

    def of_rows(self, rows_RI: Tensor) -> Cut:
        """The rows of a forward product, quantized along I."""
        return self.last.of(rows_RI, lambda: self.make(cut, rows_RI, rows_vary=True))

    def of_rows_across(self, rows_RI: Tensor) -> Cut:
        """The rows for the gradient by a weight: transposed to (I, R), filled up to whole units, quantized along R."""
        return self.last_across.of(rows_RI, lambda: self.of_gradient_across(rows_RI))

    def of_gradient(self, grad_RO: Tensor) -> Cut:
        """The gradient by outputs, quantized along O."""
        return self.make(cut, grad_RO, rows_vary=True)

    def of_gradient_across(self, grad_RO: Tensor) -> Cut:
        """The gradient by outputs for that by a weight: transposed to (O, R), quantized along R.

        R is filled up to whole units by zeros.
        """
        rest = -len(grad_RO) % UNIT
        filled_RO = F.pad(grad_RO, (0, 0, 0, rest)) if rest else grad_RO
        return self.make(cut_units_across, filled_RO.unflatten(0, (-1, UNIT)), rows_vary=True)

    def of_weight(self, weight: Tensor, *, across: bool) -> Cut:
        """A weight or a stack of experts' weights (..., O, I), quantized along I.

        ``across``: (..., I, O) into (..., O, I).
        """
        function = cut_across if across else cut
        if self.kept is None:
            return self.make(function, weight)
        key = Identity.of(weight), across
        changes, made = self.kept.pop(key, (-1, None))
        if made is None or changes != self.n_changes:
            made = None  # frees the old memory before the new is made
            made = self.make(function, weight)
            self.kept_anew(made)
        self.kept[key] = self.n_changes, made
        return made

    def weights_changed(self) -> None:
        """To be called whenever the weights' values have changed: nothing quantized before is used again."""
        self.n_changes += 1
        self.last, self.last_across = Last(), Last()
        if self.kept is not None:
            self.kept = {key: made for key, made in self.kept.items() if not key[0].memory.expired()}

    def make(self, function: Callable[[Tensor], Cut], numbers: Tensor, *, rows_vary: bool = False) -> Cut:
        """The function's value, computed in the way that is best on the device."""
        if numbers.is_cpu or len(numbers) == 0:
            return function(numbers)
        return self.fuse(function, numbers, rows_vary=rows_vary)


@dataclass
class Last:
    """The result made from the last tensor, reused if the same tensor with the same values comes again.

    torch does not count writes by an all-to-all or through ``.data``, so nothing may write in that way to a tensor
    between two products that read it. Rows that arrive from other ranks are new tensors.
    """

    key: tuple[Identity, int] | None = None  # the tensor's identity, and torch's count of writes to it
    made: Cut | None = None

    def of(self, tensor: Tensor, make: Callable[[], Cut]) -> Cut:
        """What ``make`` returns; or what it returned before, if the same tensor with the same values comes again."""
        key = None if tensor.is_inference() else (Identity.of(tensor), tensor._version)
        if key is None or key != self.key or self.made is None:
            self.key = self.made = None
            made = make()
            self.key, self.made = key, made
            return made
        return self.made
