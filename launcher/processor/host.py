"""What a call of torch costs the host, Python and DeepSpeed around it included: a step of a tiny model."""

import dataclasses
import time
from statistics import median

import torch

from data.config import DataConfig, SourceConfig
from launcher.config.tree import RunConfig, TrainConfig
from launcher.estimate.samples import WholeSequences
from launcher.processor.ops import StepRecorder
from launcher.trace.regions import Regions
from launcher.training.loop import build_engine, prepare_process, run_step
from launcher.training.state import TrainState
from modeling.config import ModelConfig, MoEConfig
from parallel.config import ParallelConfig
from parallel.mesh import close_mesh, open_mesh

TIMED, WARM = 9, 3
TIMEOUT_SECONDS = 240
MODEL = ModelConfig(vocab_size=64, d_model=16, n_layers=4, n_heads=2, n_kv_heads=2, d_ff=16)
EXPERTS = MoEConfig(n_experts=4, top_k=2, d_ff=16)


def call_seconds(zero: int, precision: str, *, has_experts: bool) -> float:
    """Processor seconds of a tiny decoder's step over the calls in it; in one process that `run_ranks` has started."""
    model = dataclasses.replace(MODEL, family="qwen3_moe", moe=EXPERTS) if has_experts else MODEL
    train = TrainConfig(steps=99, global_batch_size=4, micro_batch_size=1, precision=precision)  # type: ignore[arg-type]
    config = RunConfig(
        model=model,
        data=DataConfig(seq_len=8, sources=(SourceConfig(path="none"),)),
        train=train,
        parallel=ParallelConfig(zero=zero),
    )
    prepare_process(config)
    mesh = open_mesh(config.parallel, TIMEOUT_SECONDS)
    engine, samples, state, found = build_engine(config, mesh), WholeSequences(config), TrainState(), []
    engine.initialize_weights(config.seed)
    for number in range(WARM + TIMED):
        began = time.process_time()
        run_step(config, engine, samples, state)  # type: ignore[arg-type]
        if number >= WARM:
            found.append(time.process_time() - began)
    with StepRecorder(Regions()) as recorder:
        run_step(config, engine, samples, state)  # type: ignore[arg-type]
    close_mesh()
    assert torch.get_num_threads() == 1
    return median(found) / sum(calls for ask, (calls, _) in recorder.found().items() if ask.kind == "call")
