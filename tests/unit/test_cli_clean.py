"""`roundtable runs --clean`: only what is ours, old and needed by no run goes, and only when asked for."""

import dataclasses
import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launcher.commands.clean
from data.config import DataConfig, SourceConfig
from data.prepare import prepare
from launcher.cli import main
from launcher.commands.clean import find_leftovers, may_lead_to
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from modeling.config import ModelConfig

pytestmark = pytest.mark.xdist_group("clean")  # what its tests share takes long to make

VOCAB_SIZE = 260
LONG_AGO = time.time() - 7 * 86400


def age(folder: Path) -> None:
    """Makes all in the folder a week old."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with prepared tokens of two corpora: of a run, and of none."""
    folder = tmp_path_factory.mktemp("prepared")
    here = Path.cwd()
    os.chdir(folder)
    for name in ("used", "unused"):
        (folder / f"{name}.txt").write_text(f"{name} text\n" * 50)
        prepare(data(name), vocab_size=VOCAB_SIZE)
    os.chdir(here)
    return folder


def data(name: str, **changed) -> DataConfig:
    return DataConfig(seq_len=8, sources=(SourceConfig(path=f"{name}.txt"),), workers=1, **changed)


def save_run(folder: Path, data_config: DataConfig) -> Path:
    config = RunConfig(name="run", model=ModelConfig(vocab_size=VOCAB_SIZE), data=data_config)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    return folder


@pytest.fixture
def place(prepared, tmp_path, monkeypatch):
    subprocess.run(["cp", "-r", f"{prepared}/.", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path / "runs" / "run", data("used"))
    age(tmp_path / "tokens")
    return tmp_path


def folders(place: Path) -> set[str]:
    return {stem(path) for path in (place / "tokens").iterdir()}


def stem(path: Path) -> str:
    return path.name.rpartition("-")[0].removesuffix("-txt")


def leftovers(*directories: str) -> list[str]:
    return sorted(stem(leftover.path) for leftover in find_leftovers(directories)[0])


def test_what_no_run_needs_goes_and_what_one_needs_stays(place, capsys):
    before = set((place / "tokens").iterdir())
    assert leftovers() == ["tokenizer-bpe-260", "unused"]
    assert main(["runs", "--clean", "--yes"]) == 0
    output = capsys.readouterr().out
    assert "tokens/unused-" in output
    assert "removed 2 of 2" in output
    gone = before - set((place / "tokens").iterdir())
    assert {stem(path) for path in gone} == {"unused", "tokenizer-bpe-260"}
    assert folders(place) == {"used", "tokenizer-bpe-260"}
    assert main(["runs", "--clean", "--yes"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"


def test_without_a_terminal_nothing_goes(place, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    before = sorted(place.rglob("*"))
    assert main(["runs", "--clean"]) == 1
    assert "--yes" in capsys.readouterr().out
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 1), ("no", 1)])
def test_on_a_terminal_it_is_asked(place, capsys, monkeypatch, answer, code):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert main(["runs", "--clean"]) == code
    assert ("unused" in folders(place)) == (code == 1)


def test_what_is_young_or_open_stays_and_its_tokenizer(place):
    (unused,) = (place / "tokens").glob("unused-*")
    with next(unused.glob("*.bin")).open("rb"):
        assert leftovers() == []
    assert leftovers() == ["tokenizer-bpe-260", "unused"]
    os.utime(next(unused.glob("*.idx")))
    assert leftovers() == []


def test_runs_elsewhere_count_where_they_are_named(place):
    save_run(place / "other" / "one", data("unused"))
    assert leftovers() == ["tokenizer-bpe-260", "unused"]
    assert leftovers("runs", "other") == []


@pytest.mark.parametrize("by", ["source", "link", "glob", "heldout_path", "tokenizer", "another token_dir"])
def test_what_a_run_names_by_path_stays(place, by):
    tokenizer, unused = sorted((leftover.path for leftover in find_leftovers([])[0]), key=stem)
    config = data("used", token_dir="elsewhere" if by == "another token_dir" else "tokens")
    match by:
        case "source" | "another token_dir":
            config = dataclasses.replace(config, sources=(SourceConfig(path=str(unused / "train-00000")),))
        case "link":
            for half in ("bin", "idx"):
                (place / f"linked.{half}").symlink_to(f"{unused}/train-00000.{half}")
            config = dataclasses.replace(config, sources=(SourceConfig(path="linked"),))
        case "glob":
            config = dataclasses.replace(config, sources=(SourceConfig(path="tokens/unused-*/*.idx"),))
        case "heldout_path":
            config = dataclasses.replace(config, heldout_path=f"{unused}/heldout-00000")
        case "tokenizer":
            config = dataclasses.replace(config, tokenizer=str(tokenizer))
    save_run(place / "runs" / "two", config)
    assert leftovers() == (["unused"] if by == "tokenizer" else ["tokenizer-bpe-260"])


def test_a_run_started_elsewhere_keeps_what_it_names(place, tmp_path_factory):
    (unused,) = (place / "tokens").glob("unused-*")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "shared").symlink_to(place / "tokens")
    config = dataclasses.replace(data("used", token_dir="own"), heldout_path=f"shared/{unused.name}/heldout-00000")
    run = save_run(elsewhere / "runs" / "run", config)
    assert leftovers("runs", str(run)) == ["tokenizer-bpe-260"]


def test_a_run_in_a_folder_of_runs_keeps_its_tokens(place):
    assert "unused" in leftovers()
    save_run(place / "runs" / "group" / "flat", data("unused"))
    (place / "runs" / "group" / "round").symlink_to("..")
    assert leftovers() == []


def test_a_run_whose_config_is_damaged_stops_it(place, capsys):
    (place / "runs/run/config.yaml").write_text("a: [")
    before = sorted(place.rglob("*"))
    assert main(["runs", "--clean", "--yes"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("runs/run must have a config that can be read, to know which tokens it needs")
    assert sorted(place.rglob("*")) == before


def test_what_is_not_ours_is_not_judged(place, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("shared")
    (unused,) = (place / "tokens").glob("unused-*")
    for path in (place / "tokens").glob("tokenizer-*"):
        (path / "roundtable.json").unlink()
    for name in ("corpus-0123456789abcdef", "notes", "unused-0123456789abcde", "x.partial-elsewhere-1"):
        (place / "tokens" / name).mkdir()
        (place / "tokens" / name / "manifest.txt").write_text("mine")
    unused.rename(elsewhere / unused.name)
    (place / "tokens" / unused.name).symlink_to(elsewhere / unused.name)
    age(place / "tokens")
    assert leftovers() == []


def test_a_token_dir_elsewhere_is_left_alone(place, tmp_path_factory, capsys):
    shared = tmp_path_factory.mktemp("shared") / "tokens"
    (place / "tokens").rename(shared)
    save_run(place / "runs" / "two", data("used", token_dir=str(shared)))
    before = sorted(shared.rglob("*"))
    assert main(["runs", "--clean", "--yes"]) == 0
    output = capsys.readouterr().out
    assert f"skipped: data.token_dir={shared} lies outside of the current folder" in output
    (place / "tokens").symlink_to(shared)
    assert main(["runs", "--clean", "--yes"]) == 0
    assert sorted(shared.rglob("*")) == before


def test_links_in_what_goes_are_not_followed(place, tmp_path_factory):
    precious = tmp_path_factory.mktemp("precious")
    (precious / "thesis.txt").write_text("mine")
    (unused,) = (place / "tokens").glob("unused-*")
    (unused / "link").symlink_to(precious)
    age(place / "tokens")
    os.utime(unused / "link", (LONG_AGO, LONG_AGO), follow_symlinks=False)
    assert main(["runs", "--clean", "--yes"]) == 0
    assert not unused.exists()
    assert (precious / "thesis.txt").read_text() == "mine"


def test_a_tokenizer_whose_origin_is_gone_stays(place):
    (place / "runs/run/config.yaml").unlink()
    config = dataclasses.replace(data("used"), tokenizer="mine/bpe-260")  # a folder that is no longer there
    (place / "runs/run").rmdir()
    save_run(place / "runs" / "run", config)
    assert leftovers() == ["unused"]


def test_partial_folders_of_processes_that_are_no_more_go(place):
    node = socket.gethostname()
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead = int(process.stdout)
    for pid in (dead, os.getpid()):
        (place / "tokens" / f"tokenizer-x-0123456789abcdef.partial-{node}-{pid}").mkdir()
        (place / "runs" / f".imported.partial-{node}-{pid}").mkdir()
    assert not any("partial" in leftover.path.name for leftover in find_leftovers([])[0])  # begun today
    age(place)
    gone = [leftover.path.name for leftover in find_leftovers([])[0] if "partial" in leftover.path.name]
    assert gone == [f"tokenizer-x-0123456789abcdef.partial-{node}-{dead}", f".imported.partial-{node}-{dead}"]


def test_what_an_interrupted_save_left_goes_only_from_a_run_that_is_not_live(place):
    run = place / "runs" / "run"
    partial = run / "checkpoints" / ".step-00000010.abc.partial"
    partial.mkdir(parents=True)
    (partial / "shard").write_text("half")
    age(run / "checkpoints")
    (run / ".lock").write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    (run / "metrics.jsonl").write_text("")
    assert partial not in [leftover.path for leftover in find_leftovers([])[0]]
    (run / ".lock").write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1}))
    assert main(["runs", "--clean", "--yes"]) == 0
    assert not partial.exists()


def test_a_run_started_while_the_question_is_open_keeps_its_tokens(place, monkeypatch):
    monkeypatch.setattr(
        launcher.commands.clean, "_ask", lambda question: bool(save_run(place / "runs" / "new", data("unused")))
    )
    assert main(["runs", "--clean"]) == 0
    assert "unused" in folders(place)


def test_clean_is_said_plainly(place, capsys):
    assert main(["runs", "--yes"]) == 2
    assert capsys.readouterr().err == "--yes works with --clean only; leave it out\n"
    assert main(["runs", "--clean", "--json"]) == 2


@pytest.mark.parametrize(
    ("named", "leads"),
    [
        ("/t/corpus-1", True),
        ("/t/corpus-1/train-00000", True),
        ("/t", False),
        ("/t/corpus-12", False),
        ("/t/corpus-?/train-*", True),
        ("/t/other-*", False),
        ("/**/train-00000", True),
        ("/t/**", True),
        ("/u/**", False),
    ],
)
def test_what_a_config_names_leads_to_a_folder(named: str, leads: bool) -> None:
    assert may_lead_to(Path("/t/corpus-1").parts, Path(named).parts) == leads


def test_brackets_in_a_name_are_themselves_too() -> None:
    """A tokenizer's folder is no glob: its brackets stand for themselves, and the folder stays."""
    parts = Path("/t/tokenizer-[a]").parts
    assert may_lead_to(parts, parts) and not may_lead_to(parts, Path("/t/tokenizer-b").parts)
