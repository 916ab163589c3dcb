"""Compiled functions called past torch's wrapper: the same values, whatever sizes come, in whatever order."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from modeling.kernels import direct
from modeling.kernels.direct import Direct, Route, is_plain


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def turned_about(first: Tensor, unused: Tensor, last: Tensor) -> tuple[Tensor, ...]:
    """What it makes comes in another order than it is made in, one of them twice."""
    difference, total = last - first, last + 2 * first
    return total, difference, total


def of_rows(rows_RI: Tensor, weights_TK: Tensor) -> tuple[Tensor, ...]:
    """Both first dims vary, and the value takes one of them as a number."""
    return rows_RI * len(rows_RI) + weights_TK.sum(), weights_TK * len(weights_TK)


@pytest.mark.parametrize(
    ("function", "rows_vary", "shapes"),
    [
        (turned_about, False, [[(3, 4)] * 3] * 3),
        (turned_about, True, [[(n, 4)] * 3 for n in (3, 8, 5, 3, 2)]),
        (of_rows, True, [[(n, 4), (m, 2)] for n, m in ((6, 3), (6, 5), (9, 9), (6, 3), (9, 5), (5, 9))]),
    ],
)
def test_values_are_the_functions(function: Callable, rows_vary: bool, shapes: Sequence[Any]) -> None:
    called = Direct(function, rows_vary=rows_vary)
    for each in shapes * 2:
        tensors = drawn(*each)
        with torch.no_grad():
            found = called(tensors)
        for mine, other in zip(found, function(*tensors), strict=True):
            torch.testing.assert_close(mine, other)
    assert all(isinstance(route, Route) for route in called.routes.values())


def test_a_call_whose_sizes_have_come_before_does_not_ask_torch() -> None:
    """Beside it: the code itself refuses other sizes than it is told of, so a key without them would be seen."""
    called = Direct(of_rows, rows_vary=True)
    for sizes in ((6, 3), (7, 3)):
        called(drawn((sizes[0], 4), (sizes[1], 2)))
    before = counters["stats"]["unique_graphs"]

    def refused(*tensors: Tensor) -> Any:
        raise AssertionError("torch was asked")

    called.checked = refused
    tensors = drawn((7, 4), (3, 2))
    torch.testing.assert_close(called(tensors)[0], of_rows(*tensors)[0])
    assert counters["stats"]["unique_graphs"] == before
    with pytest.raises(AssertionError, match="torch was asked"):
        called(drawn((8, 4), (3, 2)))
    other = called.routes[(6, 3), False]
    assert other is not None
    with pytest.raises(AssertionError, match="expected size 7==6"):
        other(tensors)


def test_a_tensor_in_two_places_is_no_rule_for_later_calls() -> None:
    """torch takes it for one input, by a guard that is left out here."""
    (same,) = drawn((3, 4))
    for rows_vary in (False, True):
        called = Direct(turned_about, rows_vary=rows_vary)
        for tensors in ([same] * 3, drawn((3, 4), (3, 4), (3, 4)), [same] * 3):
            torch.testing.assert_close(called(tensors)[0], turned_about(*tensors)[0])


def test_what_is_changed_in_place_is_changed_by_each_call() -> None:
    called = Direct(add_to, rows_vary=True)
    total, added = drawn((5,), (5,))
    wanted = total + 3 * added
    for _ in range(3):
        assert called((total, added)) == ()
    torch.testing.assert_close(total, wanted)


def add_to(total: Tensor, added: Tensor) -> None:
    total.add_(added)


def test_what_is_not_made_by_the_code_alone_goes_torchs_way() -> None:
    """A value that is an input as it came."""
    called = Direct(as_it_came, rows_vary=False)
    for tensors in (drawn((3, 4)), [2 * each for each in drawn((3, 4))]):
        assert torch.equal(called(tensors)[0], tensors[0])
    assert list(called.routes.values()) == [None]


def as_it_came(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor, tensor + 1


def test_sizes_are_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MOST_ROUTES", 3)
    called = Direct(turned_about, rows_vary=True)
    for n_rows in range(2, 10):
        tensors = drawn(*[(n_rows, 4)] * 3)
        torch.testing.assert_close(called(tensors)[0], turned_about(*tensors)[0])
        assert len(called.routes) <= 3


def test_deterministic_kernels_are_compiled_by_themselves() -> None:
    called = Direct(turned_about, rows_vary=False)
    called(drawn(*[(3, 4)] * 3))
    torch.use_deterministic_algorithms(True)
    try:
        called(drawn(*[(3, 4)] * 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(called.routes) == 2


def test_a_tensor_that_somebody_looks_at_is_not_plain() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    (tensor,) = drawn((3, 4))
    assert is_plain([tensor, torch.nn.Parameter(tensor)])
    mode = FakeTensorMode()
    assert not is_plain([tensor, mode.from_tensor(tensor)])
    with FlopCounterMode(display=False):
        assert not is_plain([tensor])
