"""Compiled functions called past torch's wrapper: the same values, whatever sizes come, in whatever order."""

from collections.abc import Callable
from dataclasses import replace
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
def test_values_are_the_functions(function: Callable, rows_vary: bool, shapes: list[Any]) -> None:
    called = Direct(function, rows_vary=rows_vary)
    for each in shapes * 2:
        tensors = drawn(*each)
        with torch.no_grad():
            found = called(tensors)
        for mine, other in zip(found, function(*tensors), strict=True):
            torch.testing.assert_close(mine, other)
    assert all(isinstance(route, Route) for route in called.routes.values())


def test_sizes_that_the_code_is_for_do_not_ask_torch() -> None:
    """Whether they have come before or not; and that what stood for sizes is let go."""
    called = Direct(of_rows, rows_vary=True)
    called(drawn((6, 4), (3, 2)))
    before = counters["stats"]["unique_graphs"]

    def refused(*tensors: Tensor) -> Any:
        raise AssertionError("torch was asked")

    called.checked = refused
    for n_rows, n_tokens in ((6, 3), (7, 3), (300, 2), (3, 6), (5, 5)):
        tensors = drawn((n_rows, 4), (n_tokens, 2))
        for mine, other in zip(called(tensors), of_rows(*tensors), strict=True):
            torch.testing.assert_close(mine, other)
    assert counters["stats"]["unique_graphs"] == before and len(called.routes) == 1
    with pytest.raises(AssertionError, match="torch was asked"):
        called(drawn((1, 4), (3, 2)))  # torch compiles a size of 1 as that number


def by_size(rows_RI: Tensor) -> tuple[Tensor, ...]:
    """Another function where there are many rows, and a third where there are few."""
    if rows_RI.shape[0] > 20:
        return (rows_RI * 3,)
    return (rows_RI - 1,) if 2 * rows_RI.shape[0] + 1 < 17 else (rows_RI * 2,)


def by_equality(rows_RI: Tensor, other_SI: Tensor) -> tuple[Tensor, ...]:
    """Another function where both have as many rows."""
    return (rows_RI + other_SI,) if rows_RI.shape[0] == other_SI.shape[0] else (rows_RI * other_SI.sum(),)


def test_code_for_equal_sizes_is_not_called_for_others() -> None:
    called = Direct(by_equality, rows_vary=True)
    for n_rows, n_others in ((6, 6), (6, 5), (7, 7), (5, 9), (9, 9), (4, 6)):
        tensors = drawn((n_rows, 4), (n_others, 4))
        torch.testing.assert_close(called(tensors)[0], by_equality(*tensors)[0])


def by_parity(rows_RI: Tensor) -> tuple[Tensor, ...]:
    return (rows_RI * (2 if rows_RI.shape[0] % 2 else 3),)


def test_code_is_called_for_the_sizes_alone_that_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: without what torch asks of sizes the values are another branch's."""
    sizes = [5, 30, 9, 8, 20, 21, 9, 2, 64, 10]
    called = Direct(by_size, rows_vary=True)
    for n_rows in sizes * 2:
        (tensor,) = drawn((n_rows, 4))
        torch.testing.assert_close(called([tensor])[0], by_size(tensor)[0])
    assert len(called.spans) == 3

    def careless(*arguments: Any) -> direct.Span | None:
        found = span_of(*arguments)
        return found and replace(found, bounds=((2, None),), holds=lambda *sizes: True)

    span_of = direct.span_of
    monkeypatch.setattr(direct, "span_of", careless)
    planted = Direct(by_size, rows_vary=True)
    planted(drawn((5, 4)))
    (tensor,) = drawn((30, 4))
    assert not torch.equal(planted([tensor])[0], by_size(tensor)[0])


def test_conditions_that_are_not_plain_are_left_to_torch() -> None:
    called = Direct(by_parity, rows_vary=True)
    for n_rows in (4, 5, 6, 7, 4, 7):
        (tensor,) = drawn((n_rows, 4))
        torch.testing.assert_close(called([tensor])[0], by_parity(tensor)[0])
    assert called.spans == [] and len(called.routes) == 4


def of_pairs(rows_RI: Tensor, pairs_PI: Tensor) -> tuple[Tensor, ...]:
    """There are twice as many pairs."""
    return (rows_RI + pairs_PI.unflatten(0, (-1, 2)).sum(1),)


def test_sizes_that_are_made_of_others_are_left_to_torch() -> None:
    called = Direct(of_pairs, rows_vary=True)
    for n_rows in (5, 7, 5, 12):
        tensors = drawn((n_rows, 4), (2 * n_rows, 4))
        torch.testing.assert_close(called(tensors)[0], of_pairs(*tensors)[0])
    assert len(called.routes) == 3


def test_sizes_that_were_equal_by_chance_may_differ() -> None:
    """torch takes two sizes that are equal for one, until they are not."""
    called = Direct(of_rows, rows_vary=True)
    for n_rows, n_tokens in ((6, 6), (6, 5), (7, 7), (4, 9)):
        tensors = drawn((n_rows, 4), (n_tokens, 2))
        for mine, other in zip(called(tensors), of_rows(*tensors), strict=True):
            torch.testing.assert_close(mine, other)


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
    monkeypatch.setattr(direct, "span_of", lambda *arguments: None)
    called = Direct(turned_about, rows_vary=True)
    for n_rows in range(2, 10):
        tensors = drawn(*[(n_rows, 4)] * 3)
        torch.testing.assert_close(called(tensors)[0], turned_about(*tensors)[0])
        assert len(called.routes) <= 3


def test_a_tensor_that_somebody_looks_at_is_not_plain() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    (tensor,) = drawn((3, 4))
    assert is_plain([tensor, torch.nn.Parameter(tensor)])
    mode = FakeTensorMode()
    assert not is_plain([tensor, mode.from_tensor(tensor)])
    with FlopCounterMode(display=False):
        assert not is_plain([tensor])
