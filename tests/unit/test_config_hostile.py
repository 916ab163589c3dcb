"""YAML and overrides made to take all time and memory, or to break the reader: a line within a second."""

import os
import string
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.yaml_text import MAX_BYTES, MAX_PROBLEMS, parse_yaml, read_yaml_file
from launcher.errors import UserError
from launcher.training.run_dir import saved_config

SECONDS = 4.0  # of processor time, for what takes one on an idle machine: a neighbor on the same core slows it


def laughs(first: str, level: str, part: str) -> str:
    """Twenty levels, each of which repeats the one before ten times."""
    names = string.ascii_lowercase[:20]
    lines = [
        f"{name}: &{name} {level % ', '.join(part % (number, before) for number in range(10))}"
        for before, name in pairwise(names)
    ]
    return "\n".join([f"a: &a {first}", *lines])


TOO_MUCH = "the aliases (*) make more than 8,000 values, or 32 levels, of this"
LEVELS = "must have at most 32 levels of lists and maps"
VALUES = "must have at most 8,000 values"
NO_YAML = "not valid YAML ("
TEXTS = {
    "billion laughs": (laughs("[x]", "[%s]", "%.0s*%s"), TOO_MUCH),
    "billion laughs of maps": (laughs("{x: 1}", "{%s}", "k%s: *%s"), TOO_MUCH),
    "billion laughs of merge keys": (laughs("{x: 1}", "{<<: [%s]}", "%.0s*%s"), TOO_MUCH),
    "a long chain": ("a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2000)), TOO_MUCH),
    "an anchor within itself": ("a: &x [*x]", "an alias (*) refers to what contains it"),
    "an anchor within itself, often": (f"a: &x [{'*x,' * 3000}]", "an alias (*) refers to what contains it"),
    "an anchor that merges itself": ("a: &x {<<: *x}", "an alias (*) refers to what contains it"),
    "two anchors within each other": ("a: &x {b: &y [*x, *y]}", "an alias (*) refers to what contains it"),
    "nested brackets": ("[" * 20_000, LEVELS),
    "nested braces": ("a: " + "{" * 20_000, LEVELS),
    "nested brackets with values": ("[a, " * 15_000, LEVELS),
    "nested lists": ("- " * 20_000, LEVELS),
    "nested keys": ("? " * 20_000, LEVELS),
    "nested maps": ("".join(" " * depth + "a:\n" for depth in range(60)), LEVELS),
    "many values": (f"[{'1,' * 30_000}]", VALUES),
    "many keys": ("".join(f"a{n}: 1\n" for n in range(6_000)), VALUES),
    "too large": ("#" * (MAX_BYTES + 1), "must have at most 262,144 bytes"),
    "a NUL byte": ("name: a\0b", NO_YAML),
    "a bell": ("name: \a", NO_YAML),
    "a lone surrogate": ('name: "\\ud800"', "the config cannot be read"),
    "a character beyond all": ('name: "\\UFFFFFFFF"', NO_YAML),
    "no alias": ("name: *nobody", NO_YAML),
    "a tag of Python": ("name: !!python/object/apply:os.system [id]", "the tag !!python/object/apply:os.system is not "),
    "a tag directive": ("%TAG ! tag:yaml.org,2002:python/\n---\nname: !object x", "the tag !!python/object is not known"),
    "binary": ("name: !!binary YWJj", "the tag !!binary is not known"),
    "a tag that lies": ("name: !!bool maybe", NO_YAML),
    "a number that lies": ("seed: !!int many", NO_YAML),
    "a merge of a number": ("train: {<<: 3}", NO_YAML),
    "a merge of numbers": ("train: {<<: [3, 4]}", NO_YAML),
    "two merges": ("a: &a {b: 1}\ntrain: {<<: *a, <<: *a}", "the key '<<' appears twice"),
    "duplicate keys": ("name: a\nname: b", "the key 'name' appears twice (first on line 1)"),
    "a merge of unknown keys": ("train: {<<: {stepz: 3}}", "train.stepz=3 is not a known key"),
    "an integer of 60,000 digits": ("seed: " + "9" * 60_000, NO_YAML),
    "an integer of 60,000 hexadecimal digits": ("seed: 0x" + "f" * 60_000, NO_YAML),
    "a version of YAML to come": ("%YAML 3.0\n---\nname: a", NO_YAML),
    "tags without end": ("!" * 60_000, "the tag !!!"),
    "quotes without end": ('name: "' + "\\" * 60_001, NO_YAML),
}  # fmt: skip


def refused(path: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        read_yaml_file(path)
    return caught.value.problems


def refused_in_time(path: Path, *overrides: str) -> list[str]:
    begun = time.process_time()
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    assert time.process_time() - begun < SECONDS
    assert all(line.isprintable() and len(line) < 500 for line in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_yaml_is_one_line_within_a_second(tmp_path, name):
    text, words = TEXTS[name]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    line, *more = refused_in_time(path)
    assert words in line
    assert len(more) <= 1


@pytest.mark.parametrize("name", ["billion laughs", "nested brackets", "many values", "too large", "a tag of Python"])
def test_hostile_yaml_in_an_override(tmp_path, name):
    text, words = TEXTS[name]
    path = tmp_path / "config.yaml"
    path.write_text("")
    (line,) = refused_in_time(path, f"slurm.modules={text}")
    assert words in line


def test_many_problems_of_one_file_are_cut_short(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("a: 1\n" * 1000)
    assert len(refused_in_time(path)) == MAX_PROBLEMS


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(2**30)
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero"), Path("/dev/null")):
        answers: list[list[str]] = []
        reader = threading.Thread(target=lambda path=path, answers=answers: answers.append(refused(path)), daemon=True)
        reader.start()
        reader.join(10)
        assert answers == [[f"{path}: must be a file, and is a pipe or a device; write the YAML into a file"]]
    (line,) = refused_in_time(tmp_path / "large.yaml")
    assert line.endswith(
        "large.yaml: must have at most 262,144 bytes; give a YAML config, e.g. configs/quickstart.yaml"
    )


def test_sweeps_profiles_and_saved_configs_go_through_the_same_reader(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("name: small")
    Path("bad.yaml").write_text(TEXTS["billion laughs"][0])
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/config.yaml").write_text(TEXTS["billion laughs"][0])
    for option in ("--cluster", "--sweep"):
        assert main(["submit", "config.yaml", "--dry-run", option, "bad.yaml"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert TOO_MUCH in line
    with pytest.raises(UserError, match="the aliases"):
        saved_config(Path("runs/small"))


OVERRIDES = {
    ".".join(["a"] * 2000) + "=1": "has a key of 2000 parts, and keys have at most 10; shorten it",
    "data.sources[1000000000000].path=x": "cannot be set: data.sources is a list of 0; write an index from 0 to 0",
    "data.sources.1000000000000.path=x": "cannot be set: data.sources is a list of 0; write an index from 0 to 0",
    f"data.sources[{'9' * 5000}].path=x": "cannot be set: data.sources is a list of 0; write an index from 0 to 0",
    "data.sources.².path=x": "cannot be set: data.sources is a list of 0; write an index from 0 to 0",
    "data.sources.-1.path=x": "cannot be set: data.sources is a list of 0; write an index from 0 to 0",
    "1000000000000=x": "1000000000000='x' is not a known key",
    "=" * 1000: "has an empty name before '='",
    "\0=1": "is not a known key",
    "a\nb=1": "is not a known key",
}


@pytest.mark.parametrize("override", OVERRIDES, ids=range(len(OVERRIDES)))
def test_hostile_overrides_are_one_line_within_a_second(tmp_path, override):
    path = tmp_path / "config.yaml"
    path.write_text("data: {sources: []}")
    (line,) = refused_in_time(path, override)
    assert OVERRIDES[override] in line


def test_an_anchor_may_be_used_again_without_a_word(recwarn):
    assert parse_yaml("a: &x 1\nb: &x 2\nc: *x") == ({"a": 1, "b": 2, "c": 2}, [])
    assert list(recwarn) == []


MANY = {"sources": ("data: {sources: [%s]}", "{path: a}, "), "characters": ('name: "%s"', "\\x85")}


@pytest.mark.parametrize("what", MANY)
def test_what_is_read_can_be_read_again_from_the_run_directory(tmp_path, what):
    """The saved copy has every key of every source, and escapes what is not printable."""
    text, part = MANY[what]
    path = tmp_path / "config.yaml"
    path.write_text(text % (part * (700 if what == "sources" else 30_000)))
    (line,) = refused_in_time(path)
    assert "with every key written out, as it is saved in the run directory; take globs for data.sources" in line
    path.write_text(text % (part * (300 if what == "sources" else 20_000)))
    config = load_config(path)
    path.write_text(dump_config(config))
    assert load_config(path) == config
