"""A run whose samples were dealt to its sources in a former order is refused, since it would be given some twice."""

from collections.abc import Mapping
from typing import Any

import pytest

from data.config import DataConfig, SourceConfig
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.run_dir import check_dealing
from launcher.training.state import DEALING


def config_of(n_sources: int) -> RunConfig:
    return RunConfig(data=DataConfig(sources=tuple(SourceConfig(path=f"tokens/{n}") for n in range(n_sources))))


@pytest.mark.parametrize(
    ("n_sources", "scalars"),
    [
        (2, {"consumed": 8}),
        (3, {"consumed": 0}),
        (3, {}),
        (3, {"consumed": 8, "dealing": DEALING}),
    ],
)
def test_runs_in_the_present_order_go_on(n_sources: int, scalars: Mapping[str, Any]) -> None:
    check_dealing(config_of(n_sources), scalars)


@pytest.mark.parametrize("scalars", [{"consumed": 8}, {"consumed": 8, "dealing": 1}])
def test_runs_in_the_former_order_are_refused_in_one_line(scalars: Mapping[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^data\.sources of 3 sources are dealt in order 2, and .* in order 1, so"):
        check_dealing(config_of(3), scalars)
