"""Marks parametrized cases as slow: `make test` runs the others, and the rotating targets run all of them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some_fast(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """``cases`` for ``parametrize``, with all but ``fast`` marked slow."""
    cases = list(cases)
    assert set(fast) <= set(cases), fast
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def fast_where(cases: Iterable[tuple[Any, ...]], is_fast: Callable[..., bool]) -> list[Any]:
    """``cases`` of several arguments for ``parametrize``, marked slow unless ``is_fast(*arguments)``."""
    cases = list(cases)
    assert any(is_fast(*case) for case in cases)
    return [pytest.param(*case, marks=[] if is_fast(*case) else pytest.mark.slow) for case in cases]
