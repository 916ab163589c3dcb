"""Bits of which tokens are targets, gathered for many windows at once, against those of one range of tokens each."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.masks import Masks
from data.tokenfile import TokenFile
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
