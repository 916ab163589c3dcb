"""What ranks measure together ends where a link does not carry it, whatever the backend."""

from typing import Any

import pytest
import torch

from parallel.preflight import network
from parallel.preflight.device import CPU_SIZES

CPU = torch.device("cpu")


class OverTime:
    """A collective that never ends, as NCCL tells of it under TORCH_NCCL_BLOCKING_WAIT."""

    def wait(self) -> None:
        """What torch raises when the group's limit is over."""
        raise RuntimeError("timed out in blocking wait")


@pytest.mark.parametrize("measure", [network._all_reduce, network._all_to_all])
def test_the_first_collective_is_waited_for_by_its_own_limit(monkeypatch, measure):
    """Only what is begun as asynchronous can be: NCCL gives nothing else to wait for, and the device waits for ever."""

    def begin(*_: Any, async_op: bool = False) -> OverTime | None:
        return OverTime() if async_op else None

    monkeypatch.setattr(network.dist, "get_rank", lambda: 0)
    for name in ("all_reduce", "all_to_all_single"):
        monkeypatch.setattr(network.dist, name, begin)
    with pytest.raises(RuntimeError, match="timed out"):
        measure(2, CPU, CPU_SIZES)
