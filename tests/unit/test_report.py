"""`roundtable report`: what is read, drawn and said of runs of all kinds, and what is refused."""

import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig, TrainConfig
from launcher.report.at_end import write_at_end
from launcher.report.buckets import bounds_of, bucketed
from launcher.report.curves import MOST_CURVES, MOST_POINTS, curve_keys, drawn
from launcher.report.gather import gather
from launcher.report.heat import load_codes
from launcher.report.page import render
from launcher.report.panels import KNOWN, SECTIONS
from launcher.report.read import MOST_SAMPLED, EvenSample, RunRows, read_run, without_shares
from launcher.report.summary import summary_of
from launcher.watch.metrics import encode_row, read_metrics
from report_runs import HOSTILE, START, lively_rows, update_rows, write_run

OLD = Path(__file__).parents[1] / "data" / "run_2026_11"


class Texts(html.parser.HTMLParser):
    """What a page has outside of its scripts and styles: texts, tags, links and ids."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts, self.tags, self.attributes, self.within = [], [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag in ("script", "style"):
            self.within = tag

    def handle_endtag(self, tag):
        self.within = "" if tag == self.within else self.within

    def handle_data(self, data):
        if not self.within:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def page_of(*paths: Path, **options) -> str:
    names = [path.name for path in paths]
    runs = [gather(path, name, n_runs=len(paths), **options) for path, name in zip(paths, names, strict=True)]
    return render(runs, "now")


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


# What is read and made short


def test_columns_are_the_rows_numbers(tmp_path):
    rows = [*update_rows(40, layers=2, experts=4)]
    rows[7].pop("mfu")
    rows[9] |= {"loss": float("nan"), "grad_norm": float("inf")}
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(encode_row(row) + "\n" for row in [{"step": 0, **START}, *rows]) + '{"step": 41, "lo')
    found = read_run(path)
    assert found.steps.tolist() == list(range(1, 41))
    for key in ("loss", "lr", "grad_norm", "moe/layer_01/load_max", "data/web/share"):
        np.testing.assert_array_equal(found.columns[key], [row[key] for row in rows])
    assert np.isnan(found.columns["mfu"][7]) and np.isfinite(np.delete(found.columns["mfu"], 7)).all()
    assert [row["step"] for row in found.shared] == list(range(1, 41)) and found.shared[3] == rows[3]
    assert [event["event"] for event in found.events] == ["start"]


def test_shares_are_cut_out_of_lines_and_nothing_else():
    for row in update_rows(3, layers=3, experts=5):
        row["text"] = '/load": [1]\\ "/load": ['
        row["epoch"] = [1, [2]]
        cut = json.loads(without_shares(json.dumps(row).encode()))
        assert cut == {key: None if key.endswith("/load") else value for key, value in row.items()}
    assert without_shares(b'{"step": 1, "moe/layer_00/load": [0.1, 0.') == b'{"step": 1, "moe/layer_00/load": [0.1, 0.'


@pytest.mark.parametrize("n_lines", [1, 2, MOST_SAMPLED, MOST_SAMPLED + 1, 5 * MOST_SAMPLED + 3])
def test_the_sample_is_even_and_has_both_ends(n_lines):
    sample = EvenSample()
    for step in range(n_lines):
        sample.add(json.dumps({"step": step}).encode())
    steps = [row["step"] for row in sample.rows()]
    assert steps[0] == 0 and steps[-1] == n_lines - 1 and len(steps) <= MOST_SAMPLED + 1
    assert len(steps) >= min(n_lines, MOST_SAMPLED // 2)
    assert len(set(np.diff(steps[:-1]).tolist())) <= 1


def test_a_number_with_a_figure_of_its_own_is_drawn_among_any_number_of_others():
    names = ["loss", *(f"{kind}other_{number}" for number in range(40) for kind in ("moe/", "")), "batch_size"]
    names += [panel.key for panel in KNOWN if panel.key not in ("moe/busiest", "moe/least_busy", *names)]
    keys = curve_keys(RunRows(np.arange(3), {name: np.ones(3) for name in names}))
    assert len(keys) == len(KNOWN) - 2 + 2 * MOST_CURVES
    assert {panel.key for panel in KNOWN} - {"moe/busiest", "moe/least_busy"} <= set(keys)


def test_a_bucket_keeps_its_spike_and_its_step():
    values = np.sin(np.arange(10_007) / 50)
    values[[4321, 9000]] = 50, -70
    values[100:150] = np.nan
    bounds = bounds_of(len(values), 1000)
    curve = bucketed(values, bounds)
    assert len(bounds) == 1000 and max(np.diff(bounds)) - min(np.diff(bounds)) <= 1
    highest = int(np.argmax([value if value is not None else -1e9 for value in curve["high"]]))
    assert curve["high"][highest] == 50 and bounds[highest] + curve["at"][highest] == 4321
    assert min(value for value in curve["low"] if value is not None) == -70
    assert curve["mean"][10:14] == [None] * 4
    kept = [np.nanmean(part) for part in np.split(values, bounds[1:]) if np.isfinite(part).any()]
    np.testing.assert_allclose([value for value in curve["mean"] if value is not None], kept, rtol=1e-4, atol=1e-6)
    assert bucketed(values[:20], bounds_of(20, 1000)).keys() == {"mean"}


def test_loads_are_bytes_by_their_logarithm():
    loads = np.array([0, 0.5, 1, 2, 100, np.nan])
    assert load_codes(loads).tolist() == [0, 96, 128, 160, 254, 255]


def test_the_highest_load_and_each_source_are_drawn(tmp_path):
    rows = [*update_rows(3 * MOST_POINTS, layers=2, experts=4)]
    rows[1234]["moe/layer_02/load_max"] = 3.75
    found = drawn("r", read_run(write_run(tmp_path / "r", rows) / "metrics.jsonl"), 1)
    busiest = found["curves"]["moe/busiest"]
    place = busiest["high"].index(3.75)
    assert found["first"][place] + busiest["at"][place] == 1235
    assert {"data/web/epoch", "data/code/epoch"} <= found["curves"].keys()
    assert found["layers"]["layers"] == [1, 2] and len(found["experts"]["layers"]) == 2
    assert found["hours"][-1] == pytest.approx(sum(row["step_seconds"] for row in rows) / 3600, rel=1e-3)


# What a page says of runs of all kinds


def test_a_lively_run_is_told_in_full(tmp_path):
    run = write_run(tmp_path / "lively", lively_rows(200), config=dump_config(RunConfig(name="lively")))
    page = page_of(run)
    told, data = Texts(page).text, data_of(page)
    for piece in (
        "rolled back once",
        "started 2 times",
        "train.global_batch_size",
        "spike",
        "job 77",
        "torch",
        "2.11.0",
    ):
        assert piece in told
    assert "8 ranks" in told and "4 ranks" in told
    assert data["runs"][0]["events"]["checkpoint"] == list(range(20, 201, 20))
    assert data["runs"][0]["evaluations"]["steps"] == list(range(20, 201, 20))
    assert {"loss", "lr", "grad_norm", "mfu", "peak_gib", "moe/busiest"} <= {each["key"] for each in data["panels"]}


def test_a_batch_size_before_a_change_is_the_earlier_one(tmp_path):
    config = RunConfig(name="r", train=TrainConfig(global_batch_size=16))
    run = write_run(tmp_path / "r", lively_rows(20), config=dump_config(config))
    first, second = gather(run, "r").starts
    assert first.values["train.global_batch_size"] == "8"
    assert second.values["train.global_batch_size"] == "16"
    assert second.changed == ("train.global_batch_size: 8 to 16",)


CASES = {
    "old": (OLD, "No event is recorded"),
    "dense": ([*update_rows(5, layers=0)], "No expert's load is recorded"),
    "crashed": ([{"step": 0, **START}, *update_rows(5)], "crashed or was killed"),
    "not begun": ([{"step": 0, **START}], "no update yet"),
    "empty": ([], "no update yet"),
    "bare rows": ([{"step": 1, "loss": 2.0}, {"step": 2, "loss": "NaN"}], "not recorded"),
    "torn": ([*update_rows(3)], "Loss, learning rate, norms"),
    "one step": ([*update_rows(1)], "Loss, learning rate, norms"),
    "only evaluations": ([{"step": 3, "eval_loss": 2.5}], "2.5000 at step 3"),
}


@pytest.mark.parametrize("kind", CASES)
def test_every_run_makes_a_page_that_says_so(tmp_path, kind):
    rows, piece = CASES[kind]
    config = dump_config(RunConfig(name="r"))
    run = rows if isinstance(rows, Path) else write_run(tmp_path / "r", rows, config, '{"st' * (kind == "torn"))
    page = page_of(run)
    assert piece in Texts(page).text
    assert data_of(page)["runs"][0]["name"] == run.name


def test_a_config_that_no_longer_loads_is_told(tmp_path):
    run = write_run(tmp_path / "r", [*update_rows(3)], config="model: {width: 3}\n")
    assert "The config is not shown" in Texts(page_of(run)).text


def test_several_runs_are_told_apart(tmp_path):
    configs = [dump_config(RunConfig(name=name, seed=seed)) for seed, name in enumerate("ab")]
    runs = [write_run(tmp_path / name, lively_rows(50, seed=i), configs[i]) for i, name in enumerate("ab")]
    page = page_of(*runs)
    assert [run["name"] for run in data_of(page)["runs"]] == ["a", "b"]
    assert Texts(page).texts.count("seed") == 1  # the one key in which they differ


def test_many_runs_stay_small(tmp_path):
    runs = [write_run(tmp_path / f"r{i}", update_rows(1000, seed=i, layers=1, experts=2)) for i in range(16)]
    assert len(page_of(*runs)) < 5e6


def test_links_lead_to_sections_and_names_are_unique(tmp_path):
    attributes = Texts(page_of(write_run(tmp_path / "r", lively_rows(30)))).attributes
    ids = [value for name, value in attributes if name == "id"]
    links = [value for name, value in attributes if name == "href"]
    assert len(ids) == len(set(ids)) and len(links) > 5
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert not [name for name, _ in attributes if name in ("src", "srcset", "onerror", "onload", "onclick")]


def test_every_known_figure_has_a_section():
    assert {panel.section for panel in KNOWN} <= set(SECTIONS) and len({panel.key for panel in KNOWN}) == len(KNOWN)


# Hostile texts


def hostile_run(folder: Path) -> Path:
    start = {**START, "nodes": HOSTILE, "slurm_job": HOSTILE, "commit": HOSTILE}
    start |= {"python": HOSTILE, "torch": [HOSTILE], "device": {HOSTILE: 1}}
    documents = [{"file": HOSTILE, "first": HOSTILE, "last": 2}, HOSTILE]
    rows = [{"step": 0, **start}, *update_rows(5)]
    for row in rows[1:]:
        row |= {f"data/{HOSTILE}/epoch": 0.5, f"data/{HOSTILE}/share": 1.0, HOSTILE: 3.0, "text": HOSTILE}
    rows.append({"step": 5, "event": "spike", "documents": documents, "tensor": HOSTILE})
    rows.append({"step": 5, "event": HOSTILE, HOSTILE: HOSTILE})
    rows.append({"step": 5, "event": ["no", "text"], "documents": 7})
    rows.append({"step": 5, "event": "config_change", "key": [1], "from": {"a": 1}, "to": HOSTILE})
    rows.append({"step": 5, "event": "checkpoint", "path": HOSTILE, "seconds": "long"})
    return write_run(folder / HOSTILE.replace("/", "|"), rows)


def test_hostile_texts_are_shown(tmp_path):
    page = page_of(hostile_run(tmp_path))
    seen = Texts(page)
    assert seen.tags.count("script") == 3 and "img" not in seen.tags
    assert seen.text.count("window.stolen=1") >= 6 and "\\x1b[31m\\x07\\u2028\\u202e" in seen.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]", page)
    assert page.count("</script>") == 3


def test_planted_an_unescaped_text_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.report.page.text", str)
    page = page_of(hostile_run(tmp_path))
    assert "img" in Texts(page).tags and page.count("</script>") > 3


def test_secrets_of_a_config_are_masked(tmp_path):
    secret = "hf_" + "a1B2" * 9
    run = write_run(tmp_path / "r", [*update_rows(2)], config=dump_config(RunConfig(name="r", init_from=secret)))
    page = page_of(run)
    assert secret not in page and "***" in page


# The command


def refused(capsys, *arguments: str) -> str:
    assert main(["report", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_command_writes_one_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "runs" / "one", lively_rows(20))
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert main(["report", "one"]) == 0
    assert capsys.readouterr().out == "runs/one/report.html\n"
    assert {path: path.read_bytes() for path in run.iterdir() if path.name != "report.html"} == before
    write_run(tmp_path / "runs" / "two", lively_rows(20))
    assert main(["report", "one", "runs/two"]) == 0
    assert capsys.readouterr().out == "report.html\n" and Path("report.html").stat().st_size < 1e6


def test_wrong_input_is_one_line_and_creates_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", [*update_rows(2)])
    torn = write_run(tmp_path / "torn", [])
    (torn / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\nno row\n{"step": 2, "loss": 1.0}\n')
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "pipe").mkdir()
    subprocess.run(["mkfifo", str(tmp_path / "pipe" / "metrics.jsonl")], check=True)
    before = sorted(tmp_path.rglob("*"))
    assert "must be a run directory" in refused(capsys, "nothing")
    assert "must be a run directory" in refused(capsys, "run", str(tmp_path))
    assert "line 2 is not a row" in refused(capsys, "torn")
    assert "must be a file, and is a named pipe" in refused(capsys, "pipe")
    assert "must end in .html" in refused(capsys, "run", "--out", "page.pdf")
    assert "must lie in a folder that is there" in refused(capsys, "run", "--out", "gone/page.html")
    assert "must be a file that can be written" in refused(capsys, "run", "--out", "folder.html")
    assert "--plan=Z80" in refused(capsys, "run", "--plan", "Z80")
    assert "--plan" in refused(capsys, "run", "--plan", "H100")
    assert "\\x1b" in refused(capsys, "\x1b[31mred")
    assert "NUL" in refused(capsys, "a\0b")
    assert sorted(tmp_path.rglob("*")) == before and run.is_dir()


def test_the_summary_is_of_all_rows(tmp_path):
    own = {"loss": 9.0, "step_seconds": 36.0, "mfu": 0.25, "peak_gib": 3.0, "tokens_per_second": 2000.0}
    rows = [row | own for row in update_rows(100, layers=0)]
    slow = {"mfu": 0.125, "peak_gib": 5.0, "tokens_per_second": 1000.0}  # before the last start, and for longer
    rows[:60] = [row | slow for row in rows[:60]]
    rows[98]["loss"], rows[99]["loss"] = 2.0, 3.0
    rows[3]["skipped"] = rows[4]["skipped"] = 1
    events = [{"step": 60, "event": kind} for kind in ("rollback", "rollback", "nonfinite", "spike", "restart")]
    evaluations = [{"step": step, "eval_loss": loss} for step, loss in ((40, 2.75), (80, 2.25), (100, 2.5))]
    starts = {"step": 0, **START}, {"step": 60, **START}
    run = write_run(tmp_path / "run", [starts[0], *rows[:60], starts[1], *rows[60:], *events, *evaluations])
    found = summary_of(gather(run, "run"))
    assert found == found | {
        "step": "100",
        "tokens": "6,553,600",
        "loss, last 2% of updates": "2.5000",
        "held-out loss": "2.5000",
        "best held-out loss": "2.2500 at step 80",
        "time in steps": "1:00:00",
        "tokens per second, median": "2,000",
        "MFU, median": "25.0%",
        "peak memory of rank 0": "3.00 GiB",
        "starts": "2",
        "rollbacks": "2",
        "not finite": "1",
        "spikes": "1",
        "crashes": "1",
        "updates skipped": "2",
    }


def test_losses_that_are_not_finite_are_said_in_the_summary(tmp_path):
    """The newest held-out loss, too, not the last finite one."""
    rows = [row | {"loss": "NaN"} for row in update_rows(30)]
    evaluations = [{"step": 10, "eval_loss": 2.5}, {"step": 20, "eval_loss": 2.75}, {"step": 30, "eval_loss": "NaN"}]
    run = gather(write_run(tmp_path / "run", [*rows, *evaluations]), "run")
    found = summary_of(run)
    assert found["loss, last 2% of updates"] == found["held-out loss"] == "not finite"
    assert found["best held-out loss"] == "2.5000 at step 10"
    assert "loss, last 2% of updates" not in summary_of(gather(write_run(tmp_path / "new", [START]), "new"))


def test_a_page_that_cannot_be_written_fails_no_run(tmp_path, capsys):
    run = write_run(tmp_path / "run", [*update_rows(2)])
    (run / "report.html").mkdir()
    write_at_end(run)
    (line,) = capsys.readouterr().err.splitlines()
    assert "report.html was not written" in line and "roundtable report" in line
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "report.html"]


def test_a_page_at_the_end_says_how_it_ended(tmp_path):
    rows = [*update_rows(5)]
    run = write_run(tmp_path / "run", rows, config=dump_config(RunConfig(name="run")))
    assert gather(run, "run", has_ended=True).state == "stopped"
    stop = {"step": 6, "event": "nonfinite", "action": "stop"}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, stop]))
    assert gather(run, "run", has_ended=True).state == "stopped by health.on_nonfinite"
    write_at_end(run)
    assert "stopped by health.on_nonfinite" in Texts((run / "report.html").read_text()).text


def test_rows_are_read_as_the_metrics_reader_reads_them(tmp_path):
    path = write_run(tmp_path / "r", lively_rows(60)) / "metrics.jsonl"
    rows = [row for row in read_metrics(path) if "loss" in row]
    np.testing.assert_array_equal(read_run(path).columns["loss"], [row["loss"] for row in rows])


@pytest.mark.slow
def test_100_000_steps_of_256_experts_make_5_mb_in_20_s(tmp_path):
    """Twelve layers of 256 experts: 250 MB of rows. The command's processor time, imports included."""
    run = write_run(tmp_path / "long", lively_rows(100_000, layers=12, experts=256, shares_every=100))
    code = "import resource, sys\nfrom launcher.cli import main\nassert main(['report', sys.argv[1]]) == 0\n"
    code += "used = resource.getrusage(resource.RUSAGE_SELF)\nprint(used.ru_utime + used.ru_stime)"
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert float(done.stdout.splitlines()[-1]) < 20
    assert (run / "report.html").stat().st_size < 5e6
