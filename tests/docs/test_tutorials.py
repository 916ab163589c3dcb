"""The tutorials' commands, run as they stand, each page in an empty folder; what a page says is printed is printed."""

from pathlib import Path

import pytest

from page_commands import blocks_of, run_page

TUTORIALS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))
QUICK = ("architecture",)  # the others train: half a minute of processor time each
PAGES = [pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow) for path in TUTORIALS]


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.timeout(1500)
def test_a_tutorial_does_what_it_says(path, tmp_path):
    page = path.read_text()
    wanted = sum(block.marker == "run" for block in blocks_of(page))
    assert wanted > 0 or "test_coming_from.py" in page
    assert run_page(page, tmp_path) == wanted
