"""Shards read in pieces: whatever boxes were written, whatever boxes are wanted, however the file is cut into reads."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from parallel.checkpoint import scatter
from parallel.checkpoint.boxes import Box, boxes_of_range, whole
from parallel.checkpoint.local import LocalFolder
from parallel.checkpoint.manifest import hash_file
from parallel.checkpoint.safetensors_stream import NotSafetensors, read_header, staged, write_tensors
from parallel.checkpoint.scatter import ShardReader, Target, span_of
from parallel.checkpoint.schema import Piece

FILE = "shard.safetensors"


def write(folder, logical, boxes, staging_elements=7):
    """The boxes of a logical tensor as pieces of one file, through a small staging buffer."""
    pieces = [Piece("weight", "w", box.start, box.shape, FILE, f"piece {number}") for number, box in enumerate(boxes)]
    tensors = [logical[box.slices] for box in boxes]
    shapes = {piece.key: piece.shape for piece in pieces}
    record = write_tensors(LocalFolder(folder), FILE, shapes, staged(tensors, torch.empty(staging_elements)))
    return pieces, record


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    numel = torch.Size(shape).numel()
    cuts = sorted(draw(st.sets(st.integers(1, numel), max_size=4)) | {0, numel})
    written = [box for start, stop in itertools.pairwise(cuts) for box in boxes_of_range(shape, start, stop)]
    wanted = []
    for _ in range(draw(st.integers(1, 3))):
        starts = [draw(st.integers(0, size - 1)) for size in shape]
        sizes = [draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)]
        wanted.append(Box(tuple(starts), tuple(sizes)))
    chunk_bytes, smallest_run = draw(st.sampled_from([4, 8, 12, 64, 4096])), draw(st.sampled_from([1, 12, 4096]))
    return shape, written, wanted, chunk_bytes, smallest_run, draw(st.booleans())


@settings(deadline=None, max_examples=200)
@given(cases())
def test_any_boxes_come_out_of_any_pieces(tmp_path_factory, case):
    shape, written, wanted, chunk_bytes, smallest_run, hashes = case
    folder = tmp_path_factory.mktemp("shard")
    logical = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    pieces, record = write(folder, logical, written)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scatter, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(scatter, "LARGEST_GAP", 8)
        patch.setattr(scatter, "SMALLEST_RUN", smallest_run)
        targets = [Target(box, torch.full(box.shape, -1.0)) for box in wanted]
        pairs = [(piece, each) for each in targets for piece in pieces if span_of(piece, each.box) is not None]
        digest = ShardReader(LocalFolder(folder), torch.device("cpu")).read(FILE, pairs, hashes=hashes)
    assert all(torch.equal(each.values, logical[each.box.slices]) for each in targets)
    assert digest == (record["xxh3_128"] if hashes else None)
    assert record == {"bytes": (folder / FILE).stat().st_size, "xxh3_128": hash_file(folder / FILE)}
    loaded = load_file(folder / FILE)
    assert all(torch.equal(loaded[piece.key], logical[piece.box.slices]) for piece in pieces)


def header_of(entries, length=None):
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(64)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\x00\x00",
        header_of({}, length=2**40),
        header_of([]),
        header_of({"a": 1}),
        header_of({"a": {**F32, "dtype": "BF16"}}),
        header_of({"a": {**F32, "data_offsets": [4, 12]}}),
        header_of({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}),
        header_of({"a": {**F32, "shape": "no"}}),
    ],
)
def test_planted_wrong_headers_are_refused(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with LocalFolder(tmp_path).open(FILE) as file, pytest.raises(NotSafetensors):
        read_header(file, len(content))


def test_a_file_that_ends_early_is_refused_however_it_is_read(tmp_path):
    logical = torch.arange(100, dtype=torch.float32)
    pieces, _ = write(tmp_path, logical, [whole((100,))])
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:-4])
    for hashes in (True, False):
        target = Target(whole((100,)), torch.empty(100))
        with pytest.raises(NotSafetensors, match="ends too early"):
            ShardReader(LocalFolder(tmp_path), torch.device("cpu")).read(FILE, [(pieces[0], target)], hashes=hashes)
