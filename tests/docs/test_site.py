"""The site that `make docs` makes: whole, strict, complete in its navigation and search, and without a network."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from snowballstemmer import stemmer

from launcher.config.keys import all_keys
from rotating import fast_where
from site_build import DOCS, PAGES, build

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(DOCS, out)
    assert (done.returncode, done.stderr) == (0, "")
    return out


class Tags(HTMLParser):
    """The links of a page, and the addresses of all that a browser loads for it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if given.get(LOADED.get(tag, "")):
            self.loaded.append(given[LOADED[tag]] or "")


def tags_of(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    return tags


def is_elsewhere(address: str) -> bool:
    return re.match(r"([a-z]+:)?//", address) is not None


def fetched(name: str, text: str) -> list[str]:
    """What a file of the site has a browser fetch from another host."""
    if name.endswith(".css"):
        found = re.findall(r"url\(['\"]?([^'\")]+)", text) + re.findall(r"@import\s+['\"]([^'\"]+)", text)
    else:
        found = tags_of(text).loaded + re.findall(r"url\(['\"]?((?:https?:)?//[^'\")]+)", text)
    return [address for address in found if is_elsewhere(address)]


def test_every_page_is_in_the_navigation(site):
    home = {link.partition("#")[0] for link in tags_of((site / "index.html").read_text()).links}
    assert {page for page in PAGES if page != "index.html"} - home == set()
    assert [page for page in PAGES if not (site / page).is_file()] == []


def test_every_link_within_the_site_leads_to_a_page_and_a_heading(site):
    missing = []
    for page in PAGES:
        for link in tags_of((site / page).read_text()).links:
            path, _, anchor = link.partition("#")
            target = (site / page).parent / path if path else site / page
            if not is_elsewhere(link) and not (
                target.is_file() and (not anchor or f'id="{anchor}"' in target.read_text())
            ):
                missing.append((page, link))
    assert missing == []


def test_nothing_is_fetched_from_another_host(site):
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".svg")]
    assert len(files) > len(PAGES)
    assert {
        path.name: fetched(path.name, path.read_text()) for path in files if fetched(path.name, path.read_text())
    } == {}


def test_planted_fonts_and_scripts_of_others_are_seen():
    assert fetched("a.css", "@font-face { src: url('https://fonts.example/a.woff') }") == [
        "https://fonts.example/a.woff"
    ]
    assert fetched("a.css", '@import "//cdn.example/a.css"') == ["//cdn.example/a.css"]
    assert fetched("a.html", '<script src="https://cdn.example/a.js"></script><script src="a.js"></script>') == [
        "https://cdn.example/a.js"
    ]


def test_every_key_is_on_the_page_of_keys_and_a_word_of_the_search(site):
    page, index = (site / "config.html").read_text(), (site / "searchindex.js").read_text()
    assert [each.key for each in all_keys() if f">{each.key}</span>" not in page] == []
    words = set(re.findall(r'"([^"]+)":', index)) | set(re.findall(r"[{,](\w+):", index))
    stem = stemmer("english").stemWord
    assert {
        each.key.rsplit(".", 1)[-1] for each in all_keys() if stem(each.key.rsplit(".", 1)[-1]) not in words
    } == set()


@pytest.mark.parametrize(
    ("page", "text", "told"),
    fast_where(
        [
            ("config.md", "[gone](gone.md)", "gone.md"),
            ("config.md", "[gone](data.md#no-such-heading)", "no-such-heading"),
            ("lonely.md", "# Lonely", "isn't included in any toctree"),
            ("config.md", "```nolanguage\na\n```", "nolanguage"),
        ],
        lambda page, text, told: told in ("no-such-heading", "isn't included in any toctree"),
    ),
)
def test_planted_faults_of_the_pages_stop_the_build(tmp_path, page, text, told):
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("config.md", "data.md"):
        (docs / name).write_text(f"# {name}\n")
    shutil.copy(DOCS / "conf.py", docs)
    shutil.copytree(DOCS / "_static", docs / "_static")
    shutil.copy(DOCS.parent / "pyproject.toml", tmp_path)
    (docs / "index.md").write_text("# Home\n\n```{toctree}\nconfig\ndata\n```\n")
    assert build(docs, tmp_path / "whole").returncode == 0
    with (docs / page).open("a") as file:
        file.write(f"\n{text}\n")
    done = build(docs, tmp_path / "broken")
    assert done.returncode != 0
    assert told in done.stderr
