"""Answers for code that reads values of fake tensors, which have none: the true value if known, or a harmless one.

The training step is run over fake tensors, and reads values of a few of them: how many rows an all-to-all moves,
whether a gradient overflowed, which pairs of a sequence see each other. Whole numbers that follow from the batch alone
are computed for real, beside the fake tensors that stand for them on the device. For all others the answer is that of a
step in which nothing goes wrong.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

LARGEST = 1 << 22  # the most elements of a tensor whose values are followed; nothing here depends on larger masks
FACTORIES = frozenset(("aten::arange", "aten::zeros", "aten::ones", "aten::full"))
SHAPED_BY_VALUES = frozenset(("aten::nonzero", "aten::repeat_interleave", "aten::masked_select", "aten::_unique2"))
GROUPED = "aten::_grouped_mm"
FUSED_SGD = "aten::_fused_sgd_"  # torch 2.13 has no rule for it over fake tensors; it writes in place, returns nothing


def is_whole(dtype: torch.dtype) -> bool:
    """Whether a dtype holds integers or booleans."""
    return not (dtype.is_floating_point or dtype.is_complex)


def makes_whole(args: Any, kwargs: Any) -> bool:
    """Whether an operation without input tensors makes integers, by its dtype or because all its arguments are ints."""
    dtype = kwargs.get("dtype")
    return is_whole(dtype) if dtype is not None else all(isinstance(each, int) for each in args)


class KnownValues(TorchDispatchMode):
    """A mode within FakeTensorMode that follows integers through operations, and answers for unknown values."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Any = WeakTensorKeyDictionary()  # a fake tensor -> its values, on the host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if name == "aten::_pin_memory":  # there is no driver; page-locked memory of the host is no memory of the device
            return given[0]
        on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if given and on_host and not any(isinstance(each, FakeTensor) for each in given):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name == "aten::arange" and on_host and makes_whole(args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name == "aten::_local_scalar_dense":
            return self.answer(given[0])
        values = self.values_of(func, name, given, args, kwargs)
        if name in SHAPED_BY_VALUES and values is not None:
            device = kwargs.get("device") or given[0].device
            out = tree_map_only(Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype, device=device), values)
        elif name == GROUPED:
            out = grouped_product(*given)
        elif name == FUSED_SGD:
            out = None
        else:
            out = func(*args, **kwargs)
        if values is not None:
            self.learn(out, values)
        else:
            for each in given if name.startswith("c10d") else written(func, args, kwargs):
                self.known.pop(each, None)
        return out

    def values_of(self, func: Any, name: str, given: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """The true results of an operation on known integers; None where an input is unknown or a result no integer."""
        if not given and name not in FACTORIES:
            return None
        if name.startswith("c10d") or any(not is_whole(each.dtype) or each.numel() > LARGEST for each in given):
            return None
        if not given and name != "aten::arange" and kwargs.get("dtype") is None:
            return None
        if not (given or makes_whole(args, kwargs)) or not is_whole(kwargs.get("dtype") or torch.int64):
            return None
        if any(isinstance(each, FakeTensor) and each not in self.known for each in given):
            return None
        with unset_fake_temporarily():
            known_args, known_kwargs = tree_map_only(Tensor, self.value, (tuple(args), dict(kwargs)))
            if known_kwargs.get("device") is not None:
                known_kwargs["device"] = torch.device("cpu")
            known_kwargs.pop("pin_memory", None)
            values = func(*known_args, **known_kwargs)
        made = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
        return values if all(is_whole(each.dtype) and each.numel() <= LARGEST for each in made) else None

    def value(self, tensor: Tensor) -> Tensor:
        """The values of a tensor: those known of a fake one, or the real tensor itself."""
        return self.known[tensor] if isinstance(tensor, FakeTensor) else tensor

    def learn(self, out: Any, values: Any) -> None:
        """Keeps the values beside the fake tensors that an operation made."""
        for fake, value in zip(tree_leaves(out), tree_leaves(values), strict=True):
            if isinstance(fake, FakeTensor) and fake.shape == value.shape:
                self.known[fake] = value

    def answer(self, tensor: Tensor) -> bool | int | float:
        """The value of a tensor of one element: the known one, or else that of ``unknown``."""
        value = self.known.get(tensor) if isinstance(tensor, FakeTensor) else None
        if value is not None:
            with unset_fake_temporarily():
                return value.item()
        return unknown(tensor.dtype)


def unknown(dtype: torch.dtype) -> bool | int | float:
    """The answer for an unknown number: no flag is set (False for bool, 0 for uint8), and any other number is 1."""
    if dtype in (torch.bool, torch.uint8):
        return dtype != torch.bool and 0
    return 1.0 if dtype.is_floating_point else 1


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors into which an operation writes."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_leaves(value) if isinstance(each, Tensor)]
    return found


def grouped_product(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """The result of a grouped product as a tensor without values; torch's rule for fake tensors takes only bf16.

    Rows times a matrix for each group, (R, I) x (E, I, O) -> (R, O); or rows times rows, (M, R) x (R, N) -> (E, M, N).
    """
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[-1])
    return left.new_empty(len(ends_E), left.shape[0], right.shape[-1])


class KnownAnswers(TorchFunctionMode):
    """A mode that answers ``tolist``, ``numpy`` and ``data_ptr`` of fake tensors, by known values or ``unknown``."""

    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self.known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], FakeTensor) and name in ("tolist", "numpy", "data_ptr"):
            tensor = args[0]
            if name == "data_ptr":
                return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
            value = self.known.known.get(tensor)
            with unset_fake_temporarily():
                if value is None:
                    value = torch.full(tuple(tensor.shape), unknown(tensor.dtype), dtype=tensor.dtype)
                return value.tolist() if name == "tolist" else value.numpy()
        return func(*args, **(kwargs or {}))
