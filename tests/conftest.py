"""What every test shares: one thread, no network, repeatable examples, and a printed reason where CUDA is missing."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("WANDB_API_KEY", None)

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "roundtable", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("roundtable")

GPU_FOLDER = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs CUDA where there is none, saying so."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu") or GPU_FOLDER in item.path.parents]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none here"))
