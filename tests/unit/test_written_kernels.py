"""What inductor and Triton write for an H200 that is not there: chains read and write whole words.

Triton is no dependency: where `make bench-peers` has not been run there is none, and this is skipped with that reason.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "benchmarks" / "gpu" / "written_kernels.py"
SMALL = ("model.n_layers=2", "data.seq_len=8192", "train.global_batch_size=8", "train.precision=fp8")
HAS_TRITON = importlib.util.find_spec("triton") is not None or (ROOT / "build" / "peers" / "triton").is_dir()
OLD_WAY = """
import json, sys
from dataclasses import asdict
sys.path.insert(0, {folder!r})
import written_kernels
from launcher.estimate.device import open_device
open_device()
import torch
from modeling.kernels.cuts import cut_across, cut_units_across
for function, shape in ((cut_across, (8192, 4096)), (cut_units_across, (512, 16, 4096))):
    stride = (shape[-1],) if len(shape) == 2 else (16 * shape[-1], shape[-1])
    source = written_kernels.written(function, [(shape, (*stride, 1), torch.bfloat16)], rows_vary=True)
    for kernel in written_kernels.kernels_in(function.__name__, source):
        print(json.dumps(asdict(kernel)))
"""


def rows_of(command: list[str]) -> list[dict]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def narrowest(kernel: dict) -> int:
    return min(map(int, kernel["stores"]))


@pytest.mark.skipif(not HAS_TRITON, reason="no triton: `make bench-peers` brings it")
@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-30b-a3b"])
def test_chains_store_whole_words(model):
    """Elementwise ones 16 bytes at once; a reduction may give a number or two of each row, and of its last step."""
    found = rows_of([sys.executable, str(TOOL), str(ROOT / f"configs/models/{model}.yaml"), *SMALL])
    names = {row["chain"].rsplit(" ", 1)[0] for row in found}
    assert {"rms_norm", "rms_norm backward", "rotate", "cut", "cut_across", "cut_units_across", "fused_losses"} <= names
    losses = [row["kernel"] for row in found if row["chain"].startswith("fused_losses")]
    assert losses and all("softmax_online" in name for name in losses)  # the logits are read twice, not three times
    for kernel in found:
        if kernel["kind"] == "pointwise":
            assert narrowest(kernel) == 16, kernel
        if kernel["sizes"]["x"] >= 1 << 20:  # of so many rows or elements
            assert max(map(int, kernel["stores"])) >= 4, kernel


@pytest.mark.skipif(not HAS_TRITON, reason="no triton: `make bench-peers` brings it")
@pytest.mark.slow
def test_rows_of_unknown_alignment_would_be_stored_byte_by_byte():
    """What whole units of rows are for, and that the check above can fail."""
    found = rows_of([sys.executable, "-c", OLD_WAY.format(folder=str(TOOL.parent))])
    stores = {row["chain"]: narrowest(row) for row in found if row["kind"] == "pointwise"}
    assert stores == {"cut_across": 1, "cut_units_across": 16}


@pytest.mark.skipif(HAS_TRITON, reason="triton is here")
def test_without_triton_it_says_what_is_needed():
    done = subprocess.run([sys.executable, str(TOOL), "any.yaml"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "written_kernels: needs triton; `make bench-peers` brings it into build/peers\n"
