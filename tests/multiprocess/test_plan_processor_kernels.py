"""`plan --as cpu`: what torch computes where C++ would, while a step is traced, counts as the kernels of a run."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from cpp_passes import NEEDS_COMPILER
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.estimate.samples import WholeSequences
from launcher.processor.kernels import kernel_seconds
from launcher.processor.ops import Amounts, Ask, StepRecorder, timed_shape
from launcher.processor.plan import trace
from launcher.trace.regions import Regions
from launcher.training.loop import build_engine, prepare_process, run_step
from launcher.training.state import TrainState
from modeling.kernels.stand_ins import OBSERVERS, KernelCall
from parallel.mesh import close_mesh, open_mesh
from parallel.processes.start import run_ranks

pytestmark = pytest.mark.skipif(NEEDS_COMPILER is not None, reason=str(NEEDS_COMPILER))

CONFIG = """\
name: small
model:
  {family: mixtral, n_layers: 2, d_model: 64, n_heads: 4, n_kv_heads: 2, d_ff: 128, vocab_size: 512,
   moe: {n_experts: 4, top_k: 2, d_ff: 32}}
data: {seq_len: 64, sources: [{path: none.txt}]}
train: {global_batch_size: 8, micro_batch_size: 2}
"""
OVERRIDES = {
    "fp32": ["train.precision=fp32"],
    "bf16": [],
    "bf16, recomputed": ["train.recompute=full"],
    "bf16, a window": ["model.sliding_window=16", "train.recompute=selective"],
}
OF_BOTH_PASSES = {"attention_passes": "attention", "expert_passes": "experts"}  # one name in a profile

Counts = dict[str, int]


def counted(found: dict[Ask, Amounts]) -> Counts:
    """Calls of each kernel in C++; both passes of a kernel count together."""
    names = Counter[str]()
    for ask, (calls, _) in found.items():
        kind = ask.kind.split()[0]
        if kind in {"norm", "norm_gradients", "rotate", "cross_entropies", "cross_entropies_written"}:
            names[kind.removesuffix("_written")] += calls
        elif " " in ask.kind:
            names[kind] += calls
    return dict(names)


def kernels_of_a_step(config: RunConfig) -> tuple[Counts, Counts]:
    """Calls of kernels in C++ in a step: as torch's profiler sees them, and as a recorder counts them."""
    prepare_process(config)
    mesh = open_mesh(config.parallel, 60)
    engine, samples, state = build_engine(config, mesh), WholeSequences(config), TrainState()
    engine.initialize_weights(config.seed)
    run_step(config, engine, samples, state)  # type: ignore[arg-type]
    with torch.profiler.profile() as profile:
        run_step(config, engine, samples, state)  # type: ignore[arg-type]
    with StepRecorder(Regions()) as recorder:
        run_step(config, engine, samples, state)  # type: ignore[arg-type]
    close_mesh()
    names = [each.name.removeprefix("roundtable::") for each in profile.events() if "roundtable::" in each.name]
    return dict(Counter(OF_BOTH_PASSES.get(name, name) for name in names)), counted(recorder.found())


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_trace_counts_the_kernels_that_a_run_calls(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    ((seen, recorded),) = run_ranks(kernels_of_a_step, 1, load_config(path, OVERRIDES[name]), timeout_seconds=120)
    positions = trace(path, OVERRIDES[name], 1)
    assert positions is not None
    assert seen == recorded == counted(positions[0])
    assert {"norm", "norm_gradients", "rotate", "attention", "cross_entropies"} <= seen.keys()
    assert not any(ask.kind == "attention" for ask in positions[0])  # torch's own
    assert not OBSERVERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "shape", "level"),
    [
        ("norm", (64,), "near"),
        ("norm_gradients", (64,), "shared"),
        ("rotate", (32,), "shared"),
        ("rotate", (4096,), "near"),
        ("cross_entropies", (1 << 17,), "near"),
        ("cross_entropies_written", (512,), "memory"),
        ("attention forward", (2, 16, 64, 64), ""),
        ("attention backward", (1, 16, 2048, 256), ""),
    ],
)
def test_each_kernel_has_a_rate(kind: str, shape: tuple[int, ...], level: str, dtype: torch.dtype) -> None:
    seconds = kernel_seconds(kind, dtype, shape, level)
    assert seconds is not None and 0 < seconds < 1e-6
    assert kernel_seconds("product", dtype, shape, level) is None


def test_long_sequences_and_many_experts_are_timed_by_few() -> None:
    """What is timed stays small, whatever is planned."""
    long = KernelCall("attention forward", torch.bfloat16, (64, 8, 128, 1 << 17, 1 << 17), flops=1.0)
    local = KernelCall("attention backward", torch.bfloat16, (64, 64, 128, 1 << 17, 255), flops=1.0)
    many = KernelCall("experts backward", torch.float32, (256, 512, 128, 1 << 20, 3 << 18), flops=1.0)
    assert timed_shape(long) == (8, 128, 2048, 2048)
    assert timed_shape(local) == (1, 128, 2048, 256)
    assert timed_shape(many) == (512, 128, 1024, 6)


@pytest.mark.parametrize(("each", "kept"), [("forward", 4), ("backward", 4), ("backward", 0), ("backward", 2)])
def test_experts_have_a_rate(each: str, kept: int) -> None:
    seconds = kernel_seconds(f"experts {each}", torch.float32, (64, 32, 64, kept), "")
    assert seconds is not None and 0 < seconds < 1e-6
