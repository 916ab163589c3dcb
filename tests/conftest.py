"""What every test shares: one thread, no network, repeatable examples, and a printed reason where CUDA is missing.

With `--budget-minutes N` no test is begun after N minutes; those left out are skipped with that reason.
`--begin-at TEXT` then lets the run begin with another test for each text (a commit's hash, say), so that all have
their turn.
"""

import gc
import os
import time
import zlib
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.environ.get("TESTS_ON_GPU") != "1":  # as `make gpu` sets it: elsewhere all tests compute on the CPU, over gloo
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("WANDB_API_KEY", None)

import pytest
from hypothesis import HealthCheck, settings

from parallel.processes.start import PRELOAD

settings.register_profile(
    "roundtable", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("roundtable")

# The ranks of all tests come from one fork server, which imports what the first test's ranks need: here, all that most
# of them import (1.3 s of processor time for each rank, 2 cores, 2026-11-22).
PRELOAD += ["launcher.training.loop", "launcher.prove.rank"]

STARTED = time.monotonic()
GPU_FOLDER = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The budget."""
    parser.addoption("--budget-minutes", type=float, default=None, help="begin no test after this many minutes")
    parser.addoption("--begin-at", default="", help="any text: which test comes first where there is a budget")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what would begin too late, saying so."""
    minutes = item.config.getoption("--budget-minutes")
    if minutes is not None and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"not begun: the {minutes:g} minutes of --budget-minutes are over")


def rotate(items: list[pytest.Item], text: str) -> None:
    """Lets the tests begin elsewhere than at the first: where, follows from the text."""
    first = zlib.crc32(text.encode()) % max(1, len(items))
    items[:] = items[first:] + items[:first]


def pytest_collection_finish() -> None:
    """All modules are imported: the garbage collector need not look through them again."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what needs CUDA where there is none, saying so."""
    if config.getoption("--budget-minutes") is not None:
        rotate(items, config.getoption("--begin-at"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu") or GPU_FOLDER in item.path.parents]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device and TESTS_ON_GPU=1, and torch finds none here")
            )
