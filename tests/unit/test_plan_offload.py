"""Activations on the host in plans: what closed forms say of memory and time, and what the hardware's files state."""

from pathlib import Path

import pytest

from launcher.closed_form.gpus import gpu_of
from launcher.closed_form.own import job_of_config
from launcher.closed_form.work import work_of
from launcher.config.load import load_config
from launcher.estimate.pass_over import Traced
from launcher.estimate.step import copies_left
from launcher.plan.quick import quick_plan, room_on
from launcher.plan.report import offload_line
from launcher.trace.hardware import read_hardware
from launcher.trace.ops import Op, Work
from launcher.trace.parts import COPIES
from launcher.trace.recorder import Memory

CUT = ("parallel.tp=4", "parallel.zero=2", "data.seq_len=8192", "train.global_batch_size=64")


def config_of(*overrides: str):
    return load_config(Path("configs/models/llama-3-8b.yaml"), [*CUT, *overrides])


def seconds_of(*overrides: str) -> float:
    hardware = read_hardware("H100")
    plan = quick_plan(config_of(*overrides), 16, hardware, room_on(hardware))
    return plan["step_seconds"]


def test_closed_forms_count_what_nothing_hides_of_the_copies():
    """A layer's input is copied while it computes; all that `none` keeps is not."""
    off, on = ("train.offload_activations=false", "train.offload_activations=true")
    assert seconds_of("train.recompute=full", on) == seconds_of("train.recompute=full", off)
    assert seconds_of("train.recompute=none", on) > 1.5 * seconds_of("train.recompute=none", off)


def test_the_last_layer_before_the_head_sends_nothing():
    gpu = gpu_of("H100", 8, "")

    def sent(n_layers: int) -> float:
        config = config_of(f"model.n_layers={n_layers}", "train.offload_activations=true")
        return work_of(job_of_config(config, 16, gpu, 8), gpu).host

    assert sent(1) == 0
    assert sent(9) == pytest.approx(8 * sent(2))
    bytes_of_a_layer = 8192 * 47104  # docs/measurements.md: bytes that a token leaves on a rank of tp 4
    assert sent(2) == pytest.approx(bytes_of_a_layer / 64e9, rel=0.1)


def traced(forward_bytes: int, backward_bytes: int) -> Traced:
    """A pass of 1 ms, one of 2 ms and 1 ms of recomputation, by the memory's rate."""
    rates = read_hardware("H100").rates({})
    ops = [
        Op(Work("some", "other", None, round(seconds * rates.bandwidth), 0), "other", phase)
        for seconds, phase in ((1e-3, "forward"), (1e-3, "recompute"), (2e-3, "backward"))
    ]
    return Traced(ops, Memory(), None, {"forward": forward_bytes, "backward": backward_bytes})  # type: ignore[arg-type]


def test_of_copies_what_takes_longer_than_their_pass_counts():
    rates = read_hardware("H100").rates({})
    rate = rates.wire_rate(COPIES)
    assert rate == 0.8 * 64e9
    found = list(copies_left(traced(round(3e-3 * rate), round(2.9e-3 * rate)), rates))
    assert [(op.part, op.phase) for op in found] == [(COPIES, "forward")]
    assert found[0].work.sent_bytes / rate == pytest.approx(2e-3, rel=1e-3)
    assert list(copies_left(traced(10**12, 10**12), read_hardware("B200").rates({}))) == []  # no rate


def test_a_plan_says_what_the_host_holds():
    plan = {
        "host_bytes": 2.5e9,
        "host_copy_bytes": {"forward": 1.024e9, "backward": 1.024e9},
        "gpus_per_node": 8,
        "host_rate": 51.2e9,
    }
    line = offload_line(plan)
    assert "2.50 GB of page-locked memory a rank, 20.00 a node" in line
    assert "1.02 GB a micro-batch each way, which takes 20.00 ms at 51.2 GB/s beside each pass" in line
    assert "no host_bytes_per_second" in offload_line(plan | {"host_rate": None})
