"""The report's page in a real headless Chromium: nothing complains, figures are drawn, and it fits where it is read."""

import re
from pathlib import Path

import pytest

from browser import Page, browser, needs_browser
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from launcher.report.gather import gather
from launcher.report.page import render
from report_runs import HOSTILE, START, lively_rows, update_rows, write_run

pytestmark = [needs_browser, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    """One browser for all tests."""
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """A page of one run, and of four of all kinds, with hostile texts among them."""
    folder = tmp_path_factory.mktemp("runs")
    config = dump_config(RunConfig(name="one"))
    one = write_run(folder / "one", lively_rows(300, layers=3), config=config)
    dense = write_run(folder / "dense", lively_rows(2500, seed=2, layers=0))
    nothing = write_run(folder / "nothing", [{"step": 0, **START}])
    rows = [{"step": 0, **START, "nodes": HOSTILE}, *update_rows(40)]
    for row in rows[1:]:
        row |= {HOSTILE: 1.5 + row["step"], f"data/{HOSTILE}/epoch": 0.5, f"data/{HOSTILE}/share": 1.0}
    rows.append({"step": 40, "event": HOSTILE, "message": HOSTILE})
    hostile = write_run(folder / HOSTILE.replace("/", "|"), rows)
    found = {}
    for name, runs in (("one", [one]), ("several", [one, dense, nothing, hostile])):
        found[name] = folder / f"{name}.html"
        facts = [gather(run, run.name, n_runs=len(runs)) for run in runs]
        found[name].write_text(render(facts, "now"), encoding="utf-8")
    return found


def inked(page: Page) -> list[list]:
    """For each canvas that is shown: what it is, how many of its pixels are of another colour than its first, how many
    of the first run's colour in light mode, and how many there are."""
    return page.run("""
        return [...document.querySelectorAll("canvas")].filter((canvas) => canvas.clientWidth).map((canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const pixels = new Uint32Array(data.buffer);
            const other = pixels.filter((pixel) => pixel !== pixels[0]).length;
            const blue = pixels.filter((pixel) => pixel === 0xffb27200).length;  // #0072b2
            return [canvas.closest("figure").querySelector("figcaption span").textContent, other, blue, pixels.length];
        });""")


@pytest.mark.parametrize("name", ["one", "several"])
def test_nothing_complains_and_nothing_is_fetched(page, files, name):
    page.resize(1300)
    page.open(files[name])
    figures = page.run("return document.querySelectorAll('figure').length")
    assert int(page.run("return document.documentElement.dataset.drawn")) == figures + 1  # and the time line
    assert figures > 15
    assert page.complaints() == [] and page.requests() == []


@pytest.mark.parametrize("name", ["one", "several"])
def test_figures_are_drawn(page, files, name):
    page.emulate(prefers_color_scheme="light")
    page.resize(1300)
    page.open(files[name])
    found = inked(page)
    titles = [title for title, *_ in found]
    assert {"Loss", "Learning rate", "MFU", "Peak memory", "Router entropy by layer", "Layer 1"} <= set(titles)
    for title, other, blue, pixels in found:
        is_map = title.startswith(("Layer", "Busiest expert by", "Router"))
        assert pixels > other > (0 if is_map else 300), title
        assert is_map or name == "several" or blue > 100, title
    lanes = page.run(
        "return [...document.querySelectorAll('.lane')].map((lane) => lane.querySelectorAll('line').length)"
    )
    assert len(lanes) >= 6 and min(lanes) >= 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 400, 1300])
@pytest.mark.parametrize("name", ["one", "several"])
def test_it_fits_its_width(page, files, name, width, scheme):
    page.emulate(prefers_color_scheme=scheme)
    page.resize(width)
    page.open(files[name])
    wide, small = page.run("""
        const letters = [...document.querySelectorAll("p, td, th, dd, dt, summary, button, figcaption")];
        const seen = letters.filter((each) => each.clientWidth);
        const sizes = seen.map((each) => parseFloat(getComputedStyle(each).fontSize));
        return [document.documentElement.scrollWidth, Math.min(...sizes)];""")
    assert wide <= width and small >= 11
    assert page.complaints() == []


def luminance(color: str) -> float:
    channels = [int(number) / 255 for number in re.findall(r"\d+", color)[:3]]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_lines_stand_out(page, files, scheme):
    """Contrast by the WCAG's formula: 4.5 for texts, 3 for the lines of runs."""
    page.emulate(prefers_color_scheme=scheme)
    page.resize(1300)
    page.open(files["several"])
    paper, *texts = page.run("""
        const colorOf = (name) => getComputedStyle(document.querySelector(name)).color;
        const texts = ["body", "a", ".remark", ".readout", ".tag.bad", ".tag.warn", "thead th"];
        return [getComputedStyle(document.body).backgroundColor, ...texts.map(colorOf)];
    """)
    lines = page.run(
        "return [...document.querySelectorAll('button .swatch')].map((each) => getComputedStyle(each).color)"
    )
    assert (luminance(paper) < 0.1) == (scheme == "dark")
    assert len(lines) == 4 and len(set(lines)) == 4
    for colors, least in ((texts, 4.5), (lines, 3)):
        for color in colors:
            low, high = sorted((luminance(color), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) >= least, color


def test_links_are_whole(page, files):
    page.open(files["several"])
    assert page.broken_links() == [] and page.run("return document.querySelectorAll('a').length") > 5


def test_hostile_texts_are_shown_and_run_nothing(page, files):
    page.resize(1300)
    page.open(files["several"])
    assert page.check_hostile().count("<script>window.stolen=1") >= 8
    titles = page.run("return [...document.querySelectorAll('figcaption span')].map((each) => each.textContent)")
    assert any("window.stolen=1" in title for title in titles)


def test_the_keyboard_reads_and_zooms(page, files):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page.emulate(prefers_color_scheme="light")
    page.resize(1300)
    page.open(files["one"])
    chart = page.driver.find_element(By.CSS_SELECTOR, "#curves-training .chart")
    readout = page.driver.find_element(By.CSS_SELECTOR, "#curves-training .readout")
    assert readout.text.startswith("step 300:")
    chart.send_keys(Keys.ARROW_LEFT)
    assert re.match(r"step 29\d: [\d.]+; held out", readout.text)
    chart.send_keys("+")
    whole = page.driver.find_element(By.ID, "whole")
    assert whole.is_enabled()
    ends = page.run("return [...document.querySelectorAll('#timeline .ends span')].map((each) => each.textContent)")
    assert int(ends[0]) > 100 and int(ends[2]) == 300
    chart.send_keys(Keys.ESCAPE)
    assert not whole.is_enabled()
    heat = page.driver.find_element(By.CSS_SELECTOR, ".heat canvas")
    heat.send_keys(Keys.ARROW_DOWN)
    told = page.driver.find_element(By.CSS_SELECTOR, ".heat .readout").text
    assert re.fullmatch(r"layer 2, step \d+: load [\d.]+", told)
    assert page.complaints() == []


def test_settings_act_on_all_figures(page, files):
    page.resize(1300)
    page.open(files["several"])
    page.run("""
        for (const [i, value] of [[0, "tokens"], [1, "0"]]) {
            const select = document.querySelectorAll("#toolbar select")[i];
            select.value = value;
            select.dispatchEvent(new Event("change"));
        }
        document.querySelector("#toolbar .run").click();
        document.querySelector("figcaption button").click();
        document.querySelector("figure details").open = true;""")
    assert page.run("return document.querySelector('#timeline .ends').children[1].textContent") == "tokens"
    names = page.run("return document.querySelector('#curves-training .readout').textContent")
    assert "dense, " in names and "one, " not in names
    page.run("return new Promise((done) => setTimeout(done, 100))")
    assert page.run("return document.querySelectorAll('figure details table tbody tr').length") > 1000
    assert page.complaints() == []


def test_it_can_be_printed(page, files):
    page.emulate(prefers_color_scheme="dark")
    page.open(files["one"])
    printed = page.print_pdf()
    assert printed.startswith(b"%PDF") and len(printed) > 50_000
    assert page.run("return document.documentElement.dataset.theme") is None
    assert page.complaints() == []


def test_without_a_script_it_says_so(page, files):
    assert "which is off" in page.words_without_script(files["one"])


def test_planted_an_error_in_the_script_is_seen(page, files, tmp_path):
    text = files["one"].read_text()
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("fillToolbar(document", "fillToolbars(document"))  # nor does its hash fit any more
    page.open(broken)
    assert page.refuses_changed_script()


@pytest.mark.slow
def test_a_long_run_opens_in_a_second(page, tmp_path):
    """100,000 steps, 256 experts in each of twelve layers: until the load event, the script having drawn all."""
    run = write_run(tmp_path / "long", lively_rows(100_000, layers=12, experts=256, shares_every=100))
    file = tmp_path / "long.html"
    file.write_text(render([gather(run, "long")], "now"), encoding="utf-8")
    page.resize(1300)
    times = []
    for _ in range(5):
        page.open(file)
        times.append(page.run("return performance.getEntriesByType('navigation')[0].loadEventEnd"))
    assert page.run("return Number(document.documentElement.dataset.drawn)") > 25
    assert min(times) < 1000
    assert page.complaints() == []
