"""A CPU that multiplies 16 bits number by number is named when a run starts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launcher.config.tree import RunConfig, TrainConfig
from launcher.processor.narrow import narrow_cost
from launcher.training import low_precision
from launcher.watch.progress import event_text


class Heard:
    """Watchers that keep events."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def event(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def started(
    monkeypatch: pytest.MonkeyPatch,
    precision: Any,
    times: float | None,
    *,
    rank: int = 0,
    device: str = "cpu",
    own: bool = False,
) -> list[str]:
    """What a start tells where products take ``times`` as long as in fp32; None: they must not be measured."""
    heard, asked = Heard(), []

    def cost(stored: str, rounds: int) -> float:
        assert times is not None and rounds < 10
        asked.append(stored)
        return times

    monkeypatch.setattr(low_precision, "narrow_cost", cost)
    monkeypatch.setattr(low_precision, "is_built_by_rows", lambda dtype: own)
    config = RunConfig(train=TrainConfig(precision=precision))
    mesh: Any = SimpleNamespace(rank=rank, device=torch.device(device))
    low_precision.report_slow_products(heard, config, mesh, 7)  # type: ignore[arg-type]
    assert asked == ([] if times is None else [config.train.stored])
    return [event_text(row) for row in heard.rows]


def test_a_slow_processor_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "step 7: slow_products  precision=bf16  times_fp32=66.2  try=train.precision=fp32"
    assert started(monkeypatch, "bf16", 66.2) == [told]
    assert started(monkeypatch, "fp8", 66.2) == [told.replace("bf16", "fp8")]
    assert started(monkeypatch, "fp16", 2.9) == []


def test_nothing_is_measured_where_nothing_can_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, "fp32", None) == []
    assert started(monkeypatch, "bf16", None, rank=1) == []
    assert started(monkeypatch, "bf16", None, device="cuda") == []
    assert started(monkeypatch, "bf16", None, own=True) == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_cost_is_a_ratio(precision: Any) -> None:
    assert 0.01 < narrow_cost(precision, rounds=1) < 2000
