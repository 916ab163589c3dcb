"""What a step would ask of a GPU, over fake CUDA tensors: devices, dtypes, shapes, waits of the host, and a budget."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("cuda dry run")
PROGRAM = Path(__file__).parents[1] / "support" / "cuda_dry_run.py"
BUDGETS = Path(__file__).parents[1] / "data" / "cuda_budgets.json"


@pytest.fixture(scope="module", params=["chosen", pytest.param("whole", marks=pytest.mark.slow)])
def answer(request) -> dict[str, Any]:
    """What the dry run prints; the tests are skipped, with the reason, where there can be none."""
    command = [sys.executable, PROGRAM, *(["--whole"] if request.param == "whole" else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    if "no_shim" in found:
        pytest.skip(f"no fake CUDA device: {found['no_shim']}")
    return found


def test_families_and_layouts_run_on_cuda(answer):
    """No case mixes devices, loses a gradient's dtype or shape, or has the host wait where WAITS does not say so."""
    cases = answer["cases"]
    assert len(cases) > (110 if answer["is_whole"] else 10)
    assert {name: problems for name, problems in cases.items() if problems} == {}


def test_a_layer_keeps_its_budget(answer):
    """Launches, bytes moved and FLOPs of a layer. Whoever raises one writes it into the file, and says why."""
    layers, budgets = answer["layers"], json.loads(BUDGETS.read_text())
    assert layers.keys() == budgets.keys() if answer["is_whole"] else len(layers.keys() & budgets.keys()) == 4
    for name, directions in ((name, budgets[name]) for name in layers):
        for direction, budget in directions.items():
            found = layers[name][direction]
            over = {key: (found[key], most) for key, most in budget.items() if found[key] > most}
            assert not over, f"{name} {direction}: (found, budget) {over}; if it is worth it, raise {BUDGETS.name}"


def test_traced_flops_are_those_of_the_closed_form(answer):
    """What an estimate is made of, to the last multiplication; hardly a byte of it belongs to no part."""
    assert len(answer["flops"]) == (7 if answer["is_whole"] else 5)
    for name, found in answer["flops"].items():
        for kind in ("products", "scores"):
            traced, closed = found[kind]
            assert traced == closed, (name, kind)
        assert found["nowhere"] < 0.001, name


# Milliseconds of transformers' own eager model, traced by benchmarks/traced_peers.py (transformers 5.23, 2026-11-23),
# and the share of it that ours may take.
PEERS = {"dense 8B": (471.6, 0.9), "MoE 30B-A3B": (117.6, 0.75)}


def test_a_traced_micro_batch_takes_less_than_transformers(answer):
    """By stated rates of an H200, computed and not measured, with train.compile=auto."""
    found = answer["micro_batch_ms"]
    assert found.keys() == PEERS.keys()
    for name, (peer_ms, share) in PEERS.items():
        assert found[name] <= share * peer_ms, (name, found[name] / peer_ms)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("device mix", "found at least two devices, cuda:0 and cpu"),
        ("copied number", "the host waits for a copy to the GPU: tensor at faults.py"),
        ("item", "DataDependentOutputException"),
        ("bincount", "DynamicOutputShapeException"),
        ("sums on the host", "the step's sums are on the host, made by aten::_to_copy"),
        ("ring waits", "DataDependentOutputException"),
        ("pieces on the host", "found at least two devices, cuda:0 and cpu"),
        ("host waits for a copy", "HostWaits"),
        ("nobody waits for copies", "is free before copy_ on stream 1"),
    ],
)
def test_planted_faults_are_told(answer, fault, told):
    assert any(told in problem for problem in answer["faults"][fault]), answer["faults"]


def test_planted_copy_breaks_the_budget(answer):
    """It is no mistake, so nothing else tells of it."""
    assert answer["faults"]["extra copy"] == []
    budget = json.loads(BUDGETS.read_text())["dense 8B"]["forward"]
    assert answer["slower layer"]["forward"]["launches"] > budget["launches"]
    assert answer["slower layer"]["forward"]["bytes"] > budget["bytes"]
