"""The site in a real browser, from the disk without a network: nothing complains, it fits a telephone, search finds."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Page, browser, needs_browser
from site_build import DOCS, PAGES, build

LINK = """
    const links = [...document.querySelectorAll(".sidebar-tree a")];
    const link = links.find((each) => each.textContent.trim() === "The config");
    const inside = (each, { left, right } = each.getBoundingClientRect()) => left >= 0 && right <= 400
"""

FAST = ("index.html", "config.html", "tutorials/coming_from.html")  # the first, long tables, code

pytestmark = [needs_browser, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    assert build(DOCS, out).returncode == 0
    return out


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize("names", [FAST, pytest.param(PAGES, marks=pytest.mark.slow)], ids=["three pages", "all"])
def test_no_page_complains_or_asks_another_host_and_each_fits_its_width(page, site, names):
    """Wide tables and lines of code scroll within themselves, not the page."""
    assert {*FAST} < {*PAGES}
    for name in names:
        page.resize(1300)
        page.open(site / name)
        assert [address for address in page.requests() if not address.startswith("file://")] == [], name
        assert page.run("return [...document.images].filter((image) => !image.naturalWidth).length") == 0, name
        for width in (1300, 400):
            page.resize(width)
            wide, small = page.run("""
                const seen = [...document.querySelectorAll("article :is(p, li, td, pre, h1)")];
                const sizes = seen.map((each) => each.clientWidth && parseFloat(getComputedStyle(each).fontSize));
                return [document.documentElement.scrollWidth, Math.min(...sizes.filter((size) => size))];""")
            assert wide <= width, name
            assert small >= 11, name
        assert page.complaints() == [], name


def test_on_a_telephone_the_menu_opens_and_leads_on(page, site):
    page.resize(400)
    page.open(site / "index.html")
    assert not page.run(f"{LINK}; return inside(link)")
    page.run("document.querySelector('label[for=__navigation]').click()")
    wait_for(page, f"{LINK}; return inside(link)")
    page.run(f"{LINK}; link.click()")
    wait_for(page, "return document.querySelector('h1').textContent.startsWith('The config')")


@pytest.mark.parametrize(
    ("words", "found"),
    [("micro_batch_size", "config.html"), ("planted faults", "prove.html"), ("megatron", "tutorials/coming_from.html")],
)
def test_the_search_finds_from_the_disk(page, site, words, found):
    page.resize(1300)
    page.open(site / "index.html")
    page.run("const box = document.querySelector('input[name=q]'); box.value = arguments[0]; box.form.submit();", words)
    links = "return [...document.querySelectorAll('#search-results li a')].map((a) => a.href.split('?')[0])"
    wait_for(page, f"{links}.some((href) => href.endsWith({found!r}))")
    assert page.complaints() == []


def test_planted_complaints_and_wide_pages_are_seen(page, tmp_path):
    page.resize(400)
    (tmp_path / "a.html").write_text("<p style='width: 900px'>a</p><script>console.error('planted')</script>")
    page.open(tmp_path / "a.html")
    assert any("planted" in line for line in page.complaints())
    assert page.run("return document.documentElement.scrollWidth") > 400


def wait_for(page: Page, script: str, seconds: float = 20) -> None:
    """Until the script returns true. Raises AssertionError if it does not."""
    until = time.monotonic() + seconds
    while not page.run(script):
        assert time.monotonic() < until, script
        time.sleep(0.05)
