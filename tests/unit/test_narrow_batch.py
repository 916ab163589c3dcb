"""Batches that a device makes from narrow windows and lists of documents: each array as data/ makes it, to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from data.batch import Batch
from data.config import DataConfig, SourceConfig
from data.dataset import Dataset, open_dataset
from data.fim import FillInTheMiddle
from data.masks import MaskWriter
from data.prepare import prepare
from data.tokenfile import idx_path, mask_path
from data_reference import ARRAYS, write_token_file
from launcher.training.batches import NarrowBatch, narrow
from modeling.context import Context

CPU = torch.device("cpu")
PACKINGS = ("sequential", "best_fit", "one_document")
WIDTHS = {np.uint16: 90, np.int32: 70_000}  # ids of each type, below these


def write_documents(prefix: Path, lengths: list[int], dtype: Any, masked: bool) -> Path:
    draw = np.random.default_rng(len(lengths))
    write_token_file(prefix, [draw.integers(1, WIDTHS[dtype], n).tolist() for n in lengths], dtype)
    if masked:
        with mask_path(prefix).open("wb") as file:
            writer = MaskWriter(file)
            for n in lengths:
                writer.add(draw.random(n) < 0.5)
            writer.finish(idx_path(prefix))
    return prefix


def open_documents(
    folder: Path, lengths: list[int], seq_len: int, packing: Any, dtype: Any, masked: bool, left_out: list[int]
) -> Dataset:
    """Two files, of which one is masked if any; some of the other's documents are left out."""
    first = write_documents(folder / "a", lengths, dtype, masked=False)
    second = write_documents(folder / "b", [5, 40, 1, 9, 2], np.uint16, masked)
    sources = tuple(SourceConfig(path=str(prefix)) for prefix in (first, second))
    config = DataConfig(seq_len=seq_len, sources=sources, packing=packing, token_dir=str(folder / "tokens"))
    if left_out:
        names = [f'{{"document": "a/a:{number}"}}\n' for number in left_out]
        (folder / "list.jsonl").write_text("".join(names))
        config = DataConfig(
            seq_len=seq_len,
            sources=sources,
            packing=packing,
            token_dir=config.token_dir,
            without=str(folder / "list.jsonl"),
        )
    if packing != "sequential":
        prepare(config, vocab_size=80_000)
    return open_dataset(config, seed=1, vocab_size=80_000, split="train")


def same_as_made_on_the_host(batch: Batch, device: torch.device = CPU) -> None:
    """Arrays, padding, and what a context would find in them."""
    kept = narrow(batch, device)
    made = kept.made_on(device)
    for name in ARRAYS:
        ours, theirs = getattr(made, name).cpu().numpy(), getattr(batch, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    assert made.has_padding == batch.has_padding == bool((batch.documents_BS < 0).any())
    assert (made.next_BS is None) == (batch.next_BS is None)
    if made.next_BS is not None and batch.next_BS is not None:
        np.testing.assert_array_equal(made.next_BS.cpu().numpy(), batch.next_BS)
    for has_padding in {made.has_padding, True}:
        looked, told = (
            Context(made.positions_BS, made.documents_BS, has_padding=has_padding) for _ in ("looked", "told")
        )
        kept.tell(told)
        assert torch.equal(told.cu_seqlens[0], looked.cu_seqlens[0])
        assert (told.cu_seqlens[0].dtype, told.cu_seqlens[1]) == (torch.int32, looked.cu_seqlens[1])
        assert told.bounds == looked.bounds
        assert (told.valid_T is None) == (looked.valid_T is None)
        if told.valid_T is not None and looked.valid_T is not None:
            assert torch.equal(told.valid_T, looked.valid_T)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(2, 12),
    st.sampled_from(PACKINGS),
    st.sampled_from(list(WIDTHS)),
    st.booleans(),
    st.data(),
)
def test_a_device_makes_the_arrays_that_the_host_would(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_len: int,
    packing: str,
    dtype: Any,
    masked: bool,
    data: Any,
) -> None:
    """Any lengths of documents, packed or not, in either width, with masks and documents that are left out."""
    lengths = [*lengths, 2]  # a file has a sample
    left_out = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=4, unique=True))
    folder = tmp_path_factory.mktemp("documents")
    dataset = open_documents(folder, lengths, seq_len, packing, dtype, masked, left_out)
    if data.draw(st.booleans()):
        dataset.fim = FillInTheMiddle(0.7, 0.5, (91, 92, 93), eos_id=0, seed=1)
    same_as_made_on_the_host(dataset.read(np.arange(data.draw(st.integers(1, 9)))))


def whole(folder: Path) -> Batch:
    """Documents that end within windows, with them, and before them; padding; masks; one that is left out."""
    dataset = open_documents(folder, [3, 8, 1, 20, 4, 6], 6, "sequential", np.uint16, masked=True, left_out=[1])
    return dataset.read(np.arange(dataset.n_samples))


def test_the_whole_of_it_without_a_fault(tmp_path: Path) -> None:
    same_as_made_on_the_host(whole(tmp_path))


def _ends_count(make: Any) -> Any:
    return lambda self, window_BW, place_3F: window_BW[:, 1:].to(torch.int64)


def _numbers_run_on(make: Any) -> Any:
    def running(self: NarrowBatch, place_3F: torch.Tensor) -> Any:
        positions_BS, documents_BS = make(self, place_3F)
        return positions_BS, documents_BS + torch.arange(len(documents_BS), dtype=torch.int32)[:, None]

    return running


def _starts_late(make: Any) -> Any:
    return lambda self, place_3F: (make(self, place_3F)[0] + 1, make(self, place_3F)[1])


def _padding_is_real(make: Any) -> Any:
    return property(lambda self: None)


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (NarrowBatch, "_next", _ends_count),
        (NarrowBatch, "_numbers", _numbers_run_on),
        (NarrowBatch, "_numbers", _starts_late),
        (Batch, "is_padding_BS", _padding_is_real),
        (Batch, "boundaries", lambda make: property(lambda self: make.fget(self)[1:])),
    ],
)
def test_planted_faults_in_what_a_device_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Any
) -> None:
    batch = whole(tmp_path)
    monkeypatch.setattr(owner, name, fault(vars(owner)[name]))
    with pytest.raises(AssertionError):
        same_as_made_on_the_host(batch)


def test_no_size_depends_on_where_documents_lie(tmp_path: Path) -> None:
    """So no host waits for its device to say one: over fake tensors, which have no values, all of it is computed."""
    kept = narrow(whole(tmp_path), CPU)
    with FakeTensorMode() as mode:
        window_BW, place_3F = (mode.from_tensor(each) for each in (kept.window_BW, torch.from_numpy(kept._places())))
        made = (*kept._numbers(place_3F), kept._next(window_BW, place_3F))
    assert {tuple(each.shape) for each in made} == {kept.batch.shape}


def test_a_cpu_is_given_the_arrays_of_the_host(tmp_path: Path) -> None:
    batch = whole(tmp_path)
    assert narrow(batch, CPU).spread(CPU).tokens_BS.data_ptr() == batch.tokens_BS.ctypes.data


@pytest.mark.gpu
def test_on_cuda_the_arrays_are_the_same(tmp_path: Path) -> None:
    same_as_made_on_the_host(whole(tmp_path), torch.device("cuda", 0))
