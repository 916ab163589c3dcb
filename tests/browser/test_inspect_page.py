"""The page of `inspect` in a real headless Chromium: nothing complains, maps are drawn, and choosing tells."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Page, browser, needs_browser
from inspect_runs import HOSTILE, inspectable
from launcher.cli import main

pytestmark = [needs_browser, pytest.mark.xdist_group("browser")]
TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a model with experts, windows, sinks and sources, whose texts and name are hostile; and a dense one."""
    folder = tmp_path_factory.mktemp("inspected")
    options = {"sliding_window": 9, "full_attention_layers": (1,)}
    run, _ = inspectable(folder, "gpt_oss", sources=True, name=HOSTILE.replace("/", "|").replace("\0", ""), **options)
    records = folder / "a <b>record &lt;.jsonl"
    records.write_text(json.dumps({"text": HOSTILE}) + "\n")
    moe, dense = folder / "moe.html", folder / "dense.html"
    texts = ["--text", TEXT, "--text-file", str(records), "--text", "a"]
    assert main(["inspect", str(run), *texts, "--out", str(moe)]) == 0
    (folder / "b").mkdir()
    run, _ = inspectable(folder / "b", "llama")
    assert main(["inspect", str(run), "--text", TEXT, "--out", str(dense)]) == 0
    return {"moe": moe, "dense": dense}


def choose(page: Page, select: str, value: str) -> None:
    page.run(
        """const select = document.querySelector(arguments[0]);
        select.value = arguments[1];
        select.dispatchEvent(new Event("change"));""",
        select,
        value,
    )


def readout(page: Page, part: str) -> str:
    return page.run("return document.querySelector(`#draw-${arguments[0]} .readout`).textContent", part)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["moe", "dense"])
def test_nothing_complains_and_it_fits_a_telephone(page: Page, files: dict[str, Path], name: str, scheme: str) -> None:
    page.emulate(prefers_color_scheme=scheme)
    for width in (320, 400, 1300):
        page.resize(width)
        page.open(files[name])
        wide, small, drawn = page.run("""
            const letters = [...document.querySelectorAll("p, td, th, li, summary, small, .strip span, figcaption")];
            const sizes = letters.filter((each) => each.clientWidth || each.offsetWidth)
                .map((each) => parseFloat(getComputedStyle(each).fontSize));
            const { scrollWidth, dataset } = document.documentElement;
            return [scrollWidth, Math.min(...sizes), dataset.drawn];""")
        assert wide <= width and small >= 11
        assert int(drawn) == page.run("return document.querySelectorAll('canvas').length") >= 5
        assert page.complaints() == [] and page.requests() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_maps_are_drawn(page: Page, files: dict[str, Path], scheme: str) -> None:
    """Every map has several colours, and attention's hides the same keys in each head: those after the query."""
    page.emulate(prefers_color_scheme=scheme)
    page.resize(1300)
    page.open(files["moe"])
    found = page.run("""
        return [...document.querySelectorAll("canvas")].map((canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return [canvas.width, canvas.height, new Set(new Uint32Array(data.buffer)).size];
        });""")
    assert all(colors >= 3 for *_, colors in found) and len(found) == 4 + 2 + 1
    hidden = page.run("""
        return [...document.querySelectorAll("#draw-attention canvas")].map((canvas) => {
            const { width, height } = canvas;
            const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer);
            const card = pixels[width - 1];
            let wrong = 0;
            for (let q = 0; q < height; q += 1)
                for (let k = q + 1; k < width; k += 1) wrong += pixels[q * width + k] !== card;
            return wrong;
        });""")
    assert hidden == [0] * 4


def test_choosing_tells(page: Page, files: dict[str, Path]) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page.emulate(prefers_color_scheme="light")
    page.resize(1300)
    page.open(files["moe"])
    assert re.match(r"head 0 from “\\n” \(\d+\): \d+(\.\d)?% to “.*; its sink takes \d", readout(page, "attention"))
    first = page.driver.find_element(By.CSS_SELECTOR, "#draw-attention canvas")
    first.send_keys(Keys.ARROW_DOWN)
    assert readout(page, "attention").startswith("head 0 from “e” (1): ")
    told = page.run("return document.querySelector('#draw-attention figure .readout').textContent")
    assert re.fullmatch(r"“e” \(1\) gives [<\d.]+% to “d” \(0\)", told)
    choose(page, "#draw-attention select", "0")
    assert "every token sees itself and 8 before it" in page.run("return document.body.innerText")
    strip = page.driver.find_element(By.CSS_SELECTOR, "#draw-experts .strip")
    strip.send_keys(Keys.ARROW_LEFT)
    assert re.match(r"“.” \(\d+\): expert \d weighs [\d.]+, expert \d weighs", readout(page, "experts"))
    layer = page.run("return document.querySelector('#experts-maps figcaption span').textContent")
    assert layer == "Layer 1: experts chosen together"
    choose(page, "#draw-experts select", "0")
    layer = page.run("return document.querySelector('#experts-maps figcaption span').textContent")
    assert layer == "Layer 0: experts chosen together"
    lens = page.driver.find_element(By.CSS_SELECTOR, "#draw-lens canvas")
    lens.send_keys(Keys.ARROW_RIGHT)
    title = page.run("return document.getElementById('lens-title').textContent")
    assert title == "After “e” (1); in the text “f” follows"
    rows = page.run("return [...document.querySelectorAll('#draw-lens tbody th')].map((each) => each.textContent)")
    assert rows == ["layer 1", "layer 0", "embedding"]
    assert page.complaints() == []


def test_a_layer_without_room_for_its_pairs_says_so(page: Page, files: dict[str, Path], tmp_path: Path) -> None:
    run = files["moe"].parent / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.inspection.page.MOST_PAIRS", 1)
        words = ["--text", TEXT, "--show", "experts", "--out", str(tmp_path / "few.html")]
        assert main(["inspect", str(run), *words]) == 0
    page.open(tmp_path / "few.html")
    assert "layer 1 chooses together is left out here" in page.run("return document.body.innerText")
    assert page.run("return document.querySelectorAll('canvas').length") == 1
    choose(page, "#draw-experts select", "0")
    assert page.run("return document.querySelectorAll('canvas').length") == 2
    assert page.complaints() == []


def test_the_numbers_are_those_of_the_report(
    page: Page, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A map's cell and the lens's table, against --json: weights to half a step of a byte's root."""
    run = files["dense"].parent / "b/run"
    capsys.readouterr()
    assert main(["inspect", str(run), "--text", TEXT, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["texts"][0]
    page.open(files["dense"])
    weights = text["attention"][-1]["heads"][2]["weights"]
    found = page.run(
        """const canvas = document.querySelectorAll("#draw-attention canvas")[2];
        const box = canvas.getBoundingClientRect(), n = canvas.width, told = [];
        for (const [query, key] of arguments[0]) {
            const clientX = box.left + ((key + 0.5) * box.width) / n;
            const clientY = box.top + ((query + 0.5) * box.height) / n;
            canvas.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
            told.push(canvas.closest("figure").querySelector(".readout").textContent);
        }
        return told;""",
        [[40, 3], [12, 12], [20, 0], [30, 29]],
    )
    for line, weight in zip(found, (weights[40][3], weights[12][12], weights[20][0], weights[30][29]), strict=True):
        shown = line.partition(" gives ")[2].partition("%")[0]
        assert float(shown.replace("<", "")) == pytest.approx(100 * weight, abs=0.9), line
    cells = page.run(
        "return [...document.querySelectorAll('#draw-lens tbody tr')].map((row) => row.children[2].textContent)"
    )
    place = len(text["tokens"]) - 2
    assert [cell.replace(",", "") for cell in cells] == [str(row["next_rank"][place]) for row in text["lens"][::-1]]


def test_hostile_texts_are_shown_and_run_nothing(page: Page, files: dict[str, Path]) -> None:
    page.resize(1300)
    page.open(files["moe"])
    choose(page, "#toolbar select", "2")
    page.check_hostile("img, iframe, object, b")
    strip = page.run("return document.querySelector('#draw-attention .strip').textContent")
    assert strip.startswith("</script><script>window.stolen=1</script><img") and "\\x1b[31m\\x07\\x00" in strip
    assert page.run("return document.querySelectorAll('#toolbar option')[2].textContent") == "a <b>record &lt;.jsonl"
    choose(page, "#toolbar select", "1")  # a text of one token
    assert page.run("return document.querySelectorAll('#draw-lens tbody tr').length") == 3
    assert page.complaints() == []


def test_links_are_whole_it_prints_and_says_when_its_script_is_off(page: Page, files: dict[str, Path]) -> None:
    page.open(files["moe"])
    assert page.broken_links() == [] and page.run("return document.querySelectorAll('nav a').length") == 3
    assert page.print_pdf().startswith(b"%PDF")
    assert "which is off" in page.words_without_script(files["moe"])


def test_planted_a_change_of_the_script_is_seen(page: Page, files: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(files["moe"].read_text().replace("drawAttention()", "drawAttentions()"))
    page.open(broken)
    assert page.refuses_changed_script()
