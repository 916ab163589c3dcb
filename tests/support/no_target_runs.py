"""Runs in which one step's batch has no targets, because all of its documents have one token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConfig, SourceConfig
from data.dataset import open_dataset
from data.order import take
from data.tokenwriter import TokenFileWriter
from launcher.config.tree import RunConfig
from layout_runs import VOCAB_SIZE, RankResult, rank_result

EMPTY_STEP = 2
SEQ_LEN, BATCH, N_SAMPLES = 24, 8, 96


def write_tokens_without_targets(folder: Path, steps: Sequence[int] = (EMPTY_STEP,)) -> str:
    """Writes a token file whose documents in ``steps`` (of 8 sequences) have one token each; returns its prefix."""
    n_tokens = N_SAMPLES * SEQ_LEN + 1
    prefix = folder / "tokens"
    random = np.random.default_rng(0)
    ids = random.integers(1, VOCAB_SIZE, size=n_tokens)
    write_documents(prefix, ids, np.arange(n_tokens))
    config = DataConfig(seq_len=SEQ_LEN, sources=(SourceConfig(path=str(prefix)),))
    dataset = open_dataset(config, seed=0, vocab_size=VOCAB_SIZE, split="train")
    lone = np.zeros(n_tokens + 1, dtype=bool)
    for step in steps:  # while all documents have one token, a document's number is its token's
        for place in dataset.documents(take((step - 1) * BATCH, BATCH)):
            lone[place["first"] : place["last"] + 2] = True
    starts = np.flatnonzero(lone[:-1] | (random.random(n_tokens) < 0.1) | (np.arange(n_tokens) == 0))
    write_documents(prefix, ids, starts)
    return str(prefix)


def write_documents(prefix: Path, ids: np.ndarray, starts: np.ndarray) -> None:
    """Writes a token file of the tokens ``ids``, with documents that begin at ``starts``."""
    writer = TokenFileWriter(prefix, np.dtype(np.uint16))
    for document in np.split(ids, starts[1:]):
        writer.add(document)
    writer.finish()


@dataclass
class NoTargetResult:
    """One rank's result, and whether the empty step left everything unchanged."""

    result: RankResult
    unchanged: list[bool]  # of the empty step: pieces of weights and states, then router biases, then the updates made


def no_target_rank(configs: Sequence[RunConfig]) -> list[NoTargetResult]:
    """One rank: trains each config from step 0 on one mesh; the configs may differ in ZeRO stage and precision."""
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(configs[0].parallel, 120)
    results = [run_one(config, mesh) for config in configs]
    close_mesh()
    return results


def run_one(config: RunConfig, mesh: Any) -> NoTargetResult:
    """Trains one config, and compares everything that the engine holds before and after the empty step."""
    from launcher.config.tree import HealthConfig
    from launcher.training.health import Health
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState

    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    engine = build_engine(config, mesh)
    engine.initialize_weights(config.seed)
    state, health, rows, unchanged = TrainState(), Health(HealthConfig()), [], []
    for step in range(1, config.train.steps + 1):
        before = everything(engine)
        done = run_step(config, engine, dataset, state, health=health)
        rows.append(done.row)
        assert (done.event is not None) == (step == EMPTY_STEP), done.event
        if step == EMPTY_STEP:
            assert not done.trained
            assert done.event is not None and done.event["event"] == "no_targets"
            unchanged = [bool(np.array_equal(a, b)) for a, b in zip(before, everything(engine), strict=True)]
    return NoTargetResult(rank_result(engine, rows), unchanged)


def everything(engine: Any) -> list[np.ndarray]:
    """Copies of everything that the engine would save in a checkpoint."""
    pieces = [piece for fragment in engine.fragments for piece in engine.pieces(fragment).values()]
    buffers = list(engine.model.buffers())
    scalars = np.array([engine.updates(), *engine.loss_scaler_state().values()], dtype=float)
    return [*(tensor.detach().cpu().numpy().copy() for tensor in [*pieces, *buffers]), scalars]


def as_first_of(config: RunConfig, zero: int, precision: str) -> RunConfig:
    """The config with another ZeRO stage and precision."""
    return replace(
        config, parallel=replace(config.parallel, zero=zero), train=replace(config.train, precision=precision)
    )


@contextmanager
def one_token_documents() -> Iterator[None]:
    """A context in which proofs get token files whose documents all have one token."""
    import launcher.prove.tokens as tokens

    def write(prefix: Path, random: np.random.Generator, *, n_tokens: int, vocab_size: int, **lengths: Any) -> None:
        write_documents(prefix, random.integers(vocab_size, size=n_tokens), np.arange(n_tokens))

    original, tokens._write = tokens._write, write
    try:
        yield
    finally:
        tokens._write = original
