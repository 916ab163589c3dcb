"""Measures the time of a call of torch on small tensors, in a step of a tiny model under the config's own layout."""

import dataclasses
import time
from statistics import median

import torch

from launcher.config.tree import RunConfig
from launcher.estimate.samples import WholeSequences
from launcher.processor.ops import StepRecorder
from launcher.processor.rates import Call
from launcher.prove.shrink import least_seq_len, shrink_lengths, shrink_model
from launcher.trace.regions import Regions
from launcher.training.loop import build_engine, prepare_process, run_step
from launcher.training.state import TrainState
from parallel.mesh import Degrees, close_mesh, open_mesh, wait_for_all

TIMED, WARM = 9, 3
MICRO_BATCHES = 3  # without a pipeline; with one, as many as every schedule takes
TIMEOUT_SECONDS = 240


def call_seconds(config: RunConfig, world_size: int) -> Call:
    """The seconds of a tiny model's step over the number of calls in it, on this rank.

    All ranks that `run_ranks` has started call it.
    """
    config = tiny_relative(config, world_size)
    prepare_process(config)
    mesh = open_mesh(config.parallel, TIMEOUT_SECONDS)
    engine, samples, state = build_engine(config, mesh), WholeSequences(config), TrainState()
    walls, processor = list[float](), list[float]()
    engine.initialize_weights(config.seed)
    for _ in range(WARM + TIMED):
        wait_for_all(mesh)
        began, before = time.perf_counter(), time.process_time()
        run_step(config, engine, samples, state)  # type: ignore[arg-type]
        processor.append(time.process_time() - before)
        wait_for_all(mesh)
        walls.append(time.perf_counter() - began)
    with StepRecorder(Regions()) as recorder:
        run_step(config, engine, samples, state)  # type: ignore[arg-type]
    close_mesh()
    assert torch.get_num_threads() == 1
    calls = sum(each for ask, (each, _) in recorder.found().items() if ask.kind == "call")
    return Call(median(walls[WARM:]) / calls, median(processor[WARM:]) / calls)


def tiny_relative(config: RunConfig, world_size: int) -> RunConfig:
    """The config with the same layers, layout and schedule, but dims as small as a proof's, and few micro-batches."""
    model, train = config.model, config.train
    degrees = Degrees.of(config.parallel, world_size)
    seq_len = least_seq_len(degrees)
    small = shrink_model(model, degrees, model.n_layers, config.parallel.ep_chunks)
    each = degrees.dp * train.micro_batch_size
    n_micro_batches = min(train.batches.sizes[-1] // each, MICRO_BATCHES if degrees.pp == 1 else 2 * degrees.pp)
    return dataclasses.replace(
        config,
        model=shrink_lengths(small, config, seq_len),
        data=dataclasses.replace(config.data, seq_len=seq_len),
        train=dataclasses.replace(train, global_batch_size=n_micro_batches * each, batch_ramp=None),
    )
