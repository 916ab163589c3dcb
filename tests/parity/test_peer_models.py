"""The other trainers beside which `benchmarks/step_speed.py` sets us compute our loss of our weights.

They are skipped where build/peers does not hold them (docs/measurements.md). Losses differ by 1e-6 or less in fp32,
gradients' norms by 1e-5: sums in another order.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "peer_losses.py"
PEERS = ("megatron_core", "torchtitan")


def compared(*arguments: str) -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if "missing" in found:
        pytest.skip(f"{arguments[0]}: no module {found['missing']} here or in build/peers")
    return found


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_computes_the_same_loss_and_gradient(peer):
    found = compared(peer)
    assert found["loss"]["theirs"] == pytest.approx(found["loss"]["ours"], rel=1e-6)
    assert found["norm"]["theirs"] == pytest.approx(found["norm"]["ours"], rel=1e-5)


@pytest.mark.parametrize("peer", PEERS)
def test_planted_other_angles_are_seen(peer):
    found = compared(peer, "--planted")
    assert found["loss"]["theirs"] != pytest.approx(found["loss"]["ours"], rel=1e-4)
