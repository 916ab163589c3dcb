"""`make demo` trains in the precision that its machine can bear."""

import pytest
import torch

from launcher.commands import demo


@pytest.mark.parametrize(
    ("times", "has_gpu", "overrides"), [(8.0, False, ["train.precision=fp32"]), (1.2, False, []), (8.0, True, [])]
)
def test_a_processor_that_is_slow_in_bf16_trains_in_fp32(monkeypatch, capsys, times, has_gpu, overrides):
    monkeypatch.setattr(demo, "narrow_cost", lambda: times)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert demo.precision() == overrides
    assert ("8 times as long" in capsys.readouterr().out) == bool(overrides)


def test_the_cost_is_a_ratio():
    assert 0.01 < demo.narrow_cost() < 1000
