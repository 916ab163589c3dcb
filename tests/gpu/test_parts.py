"""The checks of `make gpu` that say whether something is right, one by one: TESTS_ON_GPU=1 pytest tests/gpu."""

import pytest

import gpu_correctness
import gpu_several
import gpu_whole
from gpu_device import hardware, the_device
from gpu_part import Check, Place
from gpu_report import Skipped

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
CHECKS = [check for part in (gpu_correctness, gpu_whole, gpu_several) for check in part.checks(1, dry=False)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_on_a_gpu(check: Check, tmp_path):
    device = the_device(dry=False)
    folder = tmp_path / "check"
    folder.mkdir()
    try:
        check.run(Place(device, False, folder, hardware(device)["count"]))
    except Skipped as reason:
        pytest.skip(str(reason))
