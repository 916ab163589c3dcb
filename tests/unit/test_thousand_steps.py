"""Steps 0 to 1000 see the same tokens under any layout, micro-batch, reader and resume: a hash of every batch.

Each rank reads as in training (what reads ahead, its share of the batch, its part of the sequence), and the parts are
put together again. Two sources, one of them shuffled in several epochs, documents of any length, a batch that grows.
"""

import contextlib
import hashlib
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.config import DataConfig, SourceConfig
from data.dataset import Dataset, open_dataset
from data_reference import write_token_file
from launcher.config.tree import RunConfig
from launcher.training.batch_ramp import BatchRamp
from launcher.training.samples import Samples, open_samples, steps_to_come
from launcher.training.step import read_micro_batch
from layout_runs import run_config
from parallel.batch import share_of_batch
from parallel.context_parallel.part import natural_order
from parallel.mesh import Degrees, Mesh
from rotating import some_fast
from simulated_mesh import meshes

STEPS, SEQ_LEN, VOCAB = 1001, 16, 50
SKIPPED = [(900, 940)]  # samples that a rollback left out

LAYOUTS: dict[str, tuple[Degrees, int]] = {  # and the micro-batch
    "dp2": (Degrees(2), 2),
    "dp4, micro-batches of 1": (Degrees(4), 1),
    "cp2": (Degrees(2, cp=2), 4),
    "tp2 cp2 dp2": (Degrees(8, tp=2, cp=2), 1),
    "pp2 dp2": (Degrees(4, pp=2), 2),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder, draw = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    sources = []
    for name, n_documents in (("large", 4000), ("small", 150)):
        documents = [draw.integers(1, VOCAB, int(n)).tolist() for n in draw.integers(1, 40, n_documents)]
        sources.append(SourceConfig(path=str(write_token_file(folder / name, documents)), weight=len(sources) + 1.0))
    base = run_config(str(folder / "large"), steps=STEPS)
    data = DataConfig(sources=tuple(sources), seq_len=SEQ_LEN)
    train = replace(
        base.train, global_batch_size=8, batch_ramp=BatchRamp(start=4, increment=4, samples=1200), micro_batch_size=4
    )
    return replace(base, data=data, train=train)


def put_together(parts: list[tuple[Mesh, torch.Tensor]], degrees: Degrees) -> np.ndarray:
    """A batch's (B, S), from each rank's (n, micro-batch, part of a sequence)."""
    by_place = {(mesh.dp.rank, mesh.cp.rank): part for mesh, part in parts}  # tp and pp have the same, see below
    for mesh, part in parts:
        assert torch.equal(part, by_place[mesh.dp.rank, mesh.cp.rank])
    rows = [torch.cat([by_place[dp, cp] for cp in range(degrees.cp)], -1) for dp in range(degrees.dp)]
    dealt = torch.stack(rows, 1).flatten(0, 2)  # micro-batches go to the ranks of dp in turn
    return dealt[:, natural_order(SEQ_LEN, degrees.cp)].numpy() if degrees.cp > 1 else dealt.numpy()


def rank_parts(config: RunConfig, reader: Samples, indices: np.ndarray, mesh: Mesh) -> dict[str, torch.Tensor]:
    """What the rank has of a batch, (n, micro-batch, part of a sequence) each; numbers of documents from the row's."""
    mine = share_of_batch(indices, config.train.micro_batch_size, mesh)
    read = [read_micro_batch(reader, part, mesh) for part in mine]
    return {
        "tokens": torch.stack([each.tokens_BS for each in read]),
        "targets": torch.stack([each.targets_BS for each in read]),
        "positions": torch.stack([each.context.positions_BS for each in read]),
        "documents": torch.stack([each.context.documents_BS for each in read]),
    }


def hashes(config: RunConfig, degrees: Degrees, step: int = 0, consumed: int = 0) -> list[str]:
    """Of every batch after ``step``, until which ``consumed`` samples were, as all ranks have it together."""
    ranks, found = list(meshes(degrees)), []
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(open_samples(config, opened(config), mesh)) for mesh in ranks]
        for reader in readers:
            reader.expect(steps_to_come(config.train, step, consumed, SKIPPED))
        for _, indices in steps_to_come(config.train, step, consumed, SKIPPED):
            parts = [rank_parts(config, reader, indices, mesh) for reader, mesh in zip(readers, ranks, strict=True)]
            whole = {
                name: put_together([(mesh, part[name]) for mesh, part in zip(ranks, parts, strict=True)], degrees)
                for name in parts[0]
            }
            found.append(hash_of(whole))
    return found


def hash_of(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(name.encode() + np.ascontiguousarray(array, np.int64).tobytes())
    return digest.hexdigest()


def opened(config: RunConfig) -> Dataset:
    return open_dataset(config.data, seed=config.seed, vocab_size=VOCAB, split="train")


@pytest.fixture(scope="module")
def plain(config: RunConfig) -> list[str]:
    """The hashes of one process that reads each batch whole, without a thread."""
    dataset, found = opened(config), []
    for _, indices in steps_to_come(config.train, 0, 0, SKIPPED):
        batch = dataset.read(indices)
        arrays = (batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS)
        found.append(hash_of(dict(zip(("tokens", "targets", "positions", "documents"), arrays, strict=True))))
    assert len(found) == len(set(found)) == STEPS
    return found


@pytest.mark.parametrize("layout", some_fast(LAYOUTS, "dp2", "cp2"))
def test_every_layout_is_given_the_batches_of_one_process(layout: str, config: RunConfig, plain: list[str]) -> None:
    degrees, micro_batch_size = LAYOUTS[layout]
    train = replace(config.train, micro_batch_size=micro_batch_size)
    assert hashes(replace(config, train=train), degrees) == plain


def test_a_resumed_run_goes_on_with_them_on_another_layout(config: RunConfig, plain: list[str]) -> None:
    """After step 500, at the end of which so many samples were consumed, read ahead by another depth."""
    for step in (1, 500):
        indices = next(each for number, each in steps_to_come(config.train, 0, 0, SKIPPED) if number == step)
        other = replace(
            config, data=replace(config.data, read_ahead=0), train=replace(config.train, micro_batch_size=1)
        )
        assert hashes(other, Degrees(2), step, int(indices[-1]) + 1) == plain[step:]


def test_planted_a_rank_that_takes_its_neighbours_micro_batches_is_seen(
    config: RunConfig, plain: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dealt in blocks, not in turn: each sample is still read once."""

    def in_blocks(indices: np.ndarray, micro_batch_size: int, mesh: Mesh) -> np.ndarray:
        dealt = indices.reshape(mesh.dp.degree, -1, micro_batch_size)
        return dealt[mesh.dp.rank]

    monkeypatch.setattr(sys.modules[__name__], "share_of_batch", in_blocks)
    few = replace(config, train=replace(config.train, steps=200, micro_batch_size=1))
    assert hashes(few, Degrees(2)) != plain[:200]
