"""Factors of products cut to 8 bits, each as often as its values change.

E4M3 (Micikevicius et al. 2022, arXiv:2209.05433, section 3) has a sign, four bits of exponent and three of fraction.
Each row along what a product sums over has a scale of its own, a power of two (modeling.kernels.fp8 says why).

Shape letters: R rows, I what a product sums over, O what comes out of it.
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
BIAS = 127  # of a float's exponent in 32 bits
FRACTION_BITS = 23
MOST = 120  # a scale lies within 2^-MOST and 2^MOST: it and its inverse are normal numbers
UNIT = 16  # tensor cores take rows of whole units of 16 bytes, along both sides of a factor

Cut = tuple[Tensor, Tensor]  # (..., I) in E4M3, contiguous, and fp32 factors (..., 1) that bring the numbers back


def cut(numbers: Tensor) -> Cut:
    """(..., I) in E4M3, contiguous, and fp32 factors (..., 1), powers of two, that bring the numbers back.

    Rows of zeros stay zeros. Of a row that is not finite the factor is NaN, and so is what is made of it: E4M3 has no
    infinity, and would hide it behind its largest number.
    """
    largest = numbers.abs().amax(-1, keepdim=True).float().view(torch.int32)
    exponent = (largest >> FRACTION_BITS) - BIAS
    above = (largest & ((1 << FRACTION_BITS) - 1)) > int(LARGEST_FRACTION * (1 << FRACTION_BITS))
    shift = (LARGEST_EXPONENT - exponent - above.to(torch.int32)).clamp(-MOST, MOST)
    factors = power_of_two(-shift).masked_fill(exponent == BIAS + 1, torch.nan)
    return (numbers.float() * power_of_two(shift)).to(E4M3).contiguous(), factors


@in_parts  # the largest numbers first, then all of them
def cut_across(numbers: Tensor) -> Cut:
    """``cut`` of the matrices' transposes: of (..., I, O) in (..., O, I), with factors (..., O, 1)."""
    return cut(numbers.transpose(-1, -2))


@in_parts
def cut_units_across(numbers_NUI: Tensor) -> Cut:
    """``cut_across`` of N units of rows (N, U, I), in (I, N * U): a compiler sees that each row begins at whole units.

    Of a number of rows that varies it would know nothing, and store byte by byte.
    """
    return cut(numbers_NUI.flatten(0, 1).t())


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp32, exactly, from int32."""
    return ((exponent + BIAS) << FRACTION_BITS).view(torch.float32)


def put_back(numbers_8: Tensor, factors: Tensor) -> Tensor:
    """What products in 8 bits multiply, in bf16, which holds it exactly."""
    return (numbers_8.float() * factors).bfloat16()


@dataclass(frozen=True)
class Identity:
    """Equal for tensors of the same elements of the same memory, whatever their values; for no other memory, ever."""

    memory: StorageWeakRef
    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Identity":
        """What tells ``tensor`` from all others."""
        return cls(StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride())


class Cuts:
    """How a model's factors are cut: by ``fuse`` in one kernel or in many, on a CPU plainly.

    Rows that several products read one after another (queries, keys and values; gate and up) are cut for the first of
    them. Weights are cut in each product, or with ``keeps_weights`` in the first one after ``weights_changed``; then
    the cut weights stay, a byte an element for forward products and one for gradients by activations.
    """

    def __init__(self, fuse: Fuse = plainly, *, keeps_weights: bool = False) -> None:
        self.fuse = fuse
        self.last, self.last_across = Last(), Last()
        self.kept: dict[tuple[Identity, bool], tuple[int, Cut]] | None = {} if keeps_weights else None
        self.n_changes = 0
        self.kept_anew: Callable[[Cut], None] = lambda made: None  # the seam at which a profile sees what is kept

    def of_rows(self, rows_RI: Tensor) -> Cut:
        """What a forward product reads, cut along I."""
        return self.last.of(rows_RI, lambda: self.make(cut, rows_RI, rows_vary=True))

    def of_rows_across(self, rows_RI: Tensor) -> Cut:
        """The same for the gradient by a weight: (I, R), as ``of_gradient_across``."""
        return self.last_across.of(rows_RI, lambda: self.of_gradient_across(rows_RI))

    def of_gradient(self, grad_RO: Tensor) -> Cut:
        """A gradient by outputs, cut along O."""
        return self.make(cut, grad_RO, rows_vary=True)

    def of_gradient_across(self, grad_RO: Tensor) -> Cut:
        """The same for the gradient by a weight: (O, R), cut along R, which is filled up to whole units by zeros."""
        rest = -len(grad_RO) % UNIT
        filled_RO = F.pad(grad_RO, (0, 0, 0, rest)) if rest else grad_RO
        return self.make(cut_units_across, filled_RO.unflatten(0, (-1, UNIT)), rows_vary=True)

    def of_weight(self, weight: Tensor, *, across: bool) -> Cut:
        """A weight, or experts' weights, (..., O, I), cut along I; ``across``: (..., I, O) into (..., O, I)."""
        function = cut_across if across else cut
        if self.kept is None:
            return self.make(function, weight)
        key = Identity.of(weight), across
        changes, made = self.kept.pop(key, (-1, None))
        if made is None or changes != self.n_changes:
            made = None  # so that what is made takes its memory
            made = self.make(function, weight)
            self.kept_anew(made)
        self.kept[key] = self.n_changes, made
        return made

    def weights_changed(self) -> None:
        """To be called whenever weights have got other values: nothing that was cut before is used again."""
        self.n_changes += 1
        self.last, self.last_across = Last(), Last()
        if self.kept is not None:
            self.kept = {key: made for key, made in self.kept.items() if not key[0].memory.expired()}

    def make(self, function: Callable[[Tensor], Cut], numbers: Tensor, *, rows_vary: bool = False) -> Cut:
        """The function's value, as the device does it best."""
        if numbers.is_cpu or len(numbers) == 0:
            return function(numbers)
        return self.fuse(function, numbers, rows_vary=rows_vary)


@dataclass
class Last:
    """What was made of the last tensor that came.

    torch counts no writing by an all-to-all or through ``.data``: what products read twice in a row must not be written
    to by those in between. Rows that arrive from other ranks are new tensors.
    """

    key: tuple[Identity, int] | None = None  # and the count of its changes
    made: Cut | None = None

    def of(self, tensor: Tensor, make: Callable[[], Cut]) -> Cut:
        """What ``make`` gives, or gave if the tensor has come again with the same values."""
        key = None if tensor.is_inference() else (Identity.of(tensor), tensor._version)
        if key is None or key != self.key or self.made is None:
            self.key = self.made = None
            made = make()
            self.key, self.made = key, made
            return made
        return self.made
