"""The page of prepared data in a real headless Chromium: it complains of nothing, is drawn, fits, and runs no text."""

import re
from pathlib import Path

import numpy as np
import pytest

from browser import Page, browser, needs_browser
from cleaning_runs import HOSTILE
from data.cleaning.kept import Sample
from launcher.corpus_report.gather import CorpusFacts, SourceFacts
from launcher.corpus_report.page import render

FULL = CorpusFacts(
    name=HOSTILE,
    sources=[
        SourceFacts(
            name=HOSTILE,
            path=f"/corpora/{HOSTILE}",
            n_train=1234567,
            n_heldout=8910,
            n_documents=700,
            n_read=1000,
            dropped={"near_duplicate": 200, HOSTILE: 100},
            changed={"mask": 40},
            bad=[HOSTILE],
            lengths=[0, 3, 50, 300, 200, 147, *[0] * 26],
            n_measured=100,
            tokens_per_word=1.31,
            bytes_per_token=4.2,
            samples={HOSTILE: [Sample(3, HOSTILE, "what it became " + HOSTILE)]},
        ),
        SourceFacts(name="books", path="/corpora/books", n_documents=9, n_read=9, lengths=[0] * 20 + [9] + [0] * 11),
    ],
    copies=[{"of": 0, "kept_in": 1, "reason": "near_duplicate", "documents": 200}],
    group_sizes={2: 150, 3: 25, 17: 1},
    copy_samples=[{"source": 0, "reason": "near_duplicate", "text": HOSTILE, "kept": HOSTILE}],
)
PLAIN = CorpusFacts("plain", [SourceFacts(name="a", path="a", n_documents=1, n_read=1, lengths=[1])], [], {}, [])


def test_a_page_fetches_nothing_and_escapes_everything():
    page = render(FULL, "now")
    assert "<img src=x" not in page and "<script>window" not in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e]", page)
    assert "default-src 'none'" in page and not re.search(r"(?:src|href)=\"?https?:", page)
    assert "<td>1,000</td><td>700</td><td>300</td><td>30.0%</td>" in page
    assert page.count("&lt;script&gt;window.stolen=1") >= 10
    assert "Nothing was dropped or changed." in render(PLAIN, "now")


def test_lengths_are_counted_by_powers_of_two(tmp_path):
    from data.tokenfile import TokenFile
    from data.tokenwriter import TokenFileWriter
    from launcher.corpus_report.gather import _lengths

    writer = TokenFileWriter(tmp_path / "x", np.dtype("<u2"))
    for length in (1, 2, 3, 4, 7, 8, 1023, 1024):
        writer.add(np.ones(length, np.int64))
    writer.finish()
    found = _lengths([TokenFile(tmp_path / "x")])
    assert {n: count for n, count in enumerate(found) if count} == {0: 1, 1: 2, 2: 2, 3: 1, 9: 1, 10: 1}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@needs_browser
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_it_is_drawn_and_fits(page, tmp_path, scheme):
    for name, facts, charts in (("full", FULL, 2), ("plain", PLAIN, 1)):
        path = Path(tmp_path / f"{name}.html")
        path.write_text(render(facts, "now"), encoding="utf-8")
        for width in (1200, 400):
            page.emulate(prefers_color_scheme=scheme)
            page.resize(width)
            page.open(path)
            wide, drawn, stolen = page.run(
                "return [document.documentElement.scrollWidth, document.documentElement.dataset.drawn, window.stolen]"
            )
            assert (wide <= width, int(drawn), stolen) == (True, charts, None)
            assert page.complaints() == [] and page.requests() == []
        inked = page.run("""
            return [...document.querySelectorAll(".chart canvas")].map((canvas) => {
                const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                const pixels = new Uint32Array(data.buffer);
                return pixels.filter((pixel) => pixel !== pixels[0]).length;
            });""")
        assert len(inked) == charts and min(inked) > 300
        paper = page.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 150) == (scheme == "dark")
