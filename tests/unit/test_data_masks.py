"""Bits of which tokens are targets, gathered for many windows at once, against those of one range of tokens each."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.masks import Masks, read_mask
from data.tokenfile import TokenFile, mask_path
from data.tokenwriter import TokenFileWriter

N_TOKENS = 403
SOME = np.random.default_rng(0).random(N_TOKENS) < 0.5


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Masks:
    """Of a file with a mask, and of one without."""
    folder: Path = tmp_path_factory.mktemp("masks")
    files = []
    for name, is_target in (("some", SOME), ("all", None)):
        writer = TokenFileWriter(folder / name, np.dtype(np.uint16), has_mask=is_target is not None)
        writer.add(np.ones(N_TOKENS, np.int64), is_target)
        writer.finish()
        files.append(TokenFile(folder / name))
    return Masks(files)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(width=st.integers(2, 70), file=st.integers(0, 1), data=st.data())
def test_windows_at_once_are_ranges_one_by_one(masks: Masks, width: int, file: int, data: st.DataObject) -> None:
    """Wherever windows begin within a byte, up to the file's last token; shorter ones too."""
    starts = data.draw(st.lists(st.integers(0, N_TOKENS - width), min_size=1, max_size=5))
    start_B, length_B = np.array(starts), np.full(len(starts), width)
    if data.draw(st.booleans()):
        length_B[-1] = data.draw(st.integers(2, width))
    found_BW = masks.of_windows(width, np.full(len(starts), file), start_B, length_B, None)
    assert found_BW.shape == (len(starts), width) and found_BW.dtype == bool
    for row_W, start, length in zip(found_BW, starts, length_B.tolist(), strict=True):
        expected = SOME[start : start + length] if file == 0 else np.ones(length, bool)
        assert row_W.tolist() == [*expected.tolist(), *[False] * (width - length)]


def put_mask(prefix: Path, sizes: list[int]) -> Path:
    """A token file of documents of these sizes, each with a mask; the path of its mask."""
    writer = TokenFileWriter(prefix, np.dtype(np.uint16), has_mask=True)
    for size in sizes:
        writer.add(np.ones(size, np.int64), np.arange(size) % 2 == 0)
    writer.finish()
    return mask_path(prefix)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda content: b"", "cannot be read"),
        (lambda content: content[:20], "is no mask of targets"),
        (lambda content: b"X" + content[1:], "is no mask of targets"),
        (lambda content: content[:-1], "bytes where 48 tokens take"),
        (lambda content: content + b"\0", "bytes where 48 tokens take"),
    ],
)
def test_a_mask_that_is_damaged_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], rule: str) -> None:
    path = put_mask(tmp_path / "a", [24, 24])
    assert read_mask(TokenFile(tmp_path / "a")) is not None
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=rf"a\.mask .*{rule}"):
        read_mask(TokenFile(tmp_path / "a"))


@pytest.mark.parametrize("sizes", [[12, 36], [24, 24, 8]])
def test_the_mask_of_another_file_is_refused(tmp_path: Path, sizes: list[int]) -> None:
    """Of as many tokens in other documents, too: a mask goes by the .idx."""
    put_mask(tmp_path / "a", [24, 24])
    put_mask(tmp_path / "b", sizes).replace(tmp_path / "a.mask")
    with pytest.raises(DataError, match=r"is the mask of another file than .*a\.idx is now"):
        read_mask(TokenFile(tmp_path / "a"))
