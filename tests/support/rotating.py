"""Cases of which `make test` runs some and the rotating targets all."""

from collections.abc import Iterable
from typing import Any

import pytest


def some_fast(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """``cases`` for ``parametrize``, all but ``fast`` marked slow."""
    cases = list(cases)
    assert set(fast) <= set(cases), fast
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]
