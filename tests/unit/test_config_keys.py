"""`roundtable config --keys`: every key with default, values and meaning, of which docs/config.md has the same table."""

import json
import os
import pty
import subprocess
import sys

import pytest

import config_docs
from launcher.cli import main
from launcher.config.keys import all_keys, meanings
from launcher.config.schema import leaf_keys
from launcher.config.tree import RunConfig
from modeling.optimizers.config import SGDConfig


def told(capsys, *arguments: str) -> str:
    assert main(["config", "--keys", *arguments]) == 0
    return capsys.readouterr().out


def test_every_key_is_there_once_with_a_meaning():
    keys = all_keys()
    assert sorted(each.key for each in keys) == sorted(set(leaf_keys(RunConfig)))
    assert [each.key for each in keys if each.meaning.endswith(": ")] == []
    assert [each.key for each in keys if not each.meaning or not each.values or not each.default] == []


def test_the_docs_have_this_table():
    written = config_docs.TABLE.search(config_docs.PAGE.read_text())
    assert written is not None
    assert written[0] == config_docs.table(), "run .venv/bin/python tests/support/config_docs.py"


def test_a_meaning_is_the_comment_beside_the_field_or_above_it():
    assert meanings(SGDConfig)["momentum"] == "momentum"
    keys = {each.key: each for each in all_keys()}
    assert keys["checkpoint.dir"].meaning.startswith("where checkpoints lie: a path, or a URL")
    assert keys["checkpoint.dir"].meaning.endswith("; null: RUN_DIR/checkpoints")
    assert keys["optimizer.lr"].meaning == "peak learning rate (sgd: 0.1)"
    assert keys["optimizer.momentum"].meaning == "sgd, muon: momentum (muon: 0.95)"
    assert keys["model.n_layers"].values == "1 to 10000"
    assert keys["train.precision"].values == "fp32, bf16, fp16, fp8"
    assert keys["parallel.pipeline.layers"].values == "a list of 1 to 10000 or null"
    assert keys["data.sources.path"].default == "required"


def test_a_pipe_gets_lines_and_json_what_a_program_reads(capsys):
    lines = told(capsys).splitlines()
    assert len(lines) == len(all_keys())
    assert lines[0].split("\t") == ["name", "run", "text", "the run's name; its directory is runs/NAME"]
    some = told(capsys, "optimizer.").splitlines()
    assert [line.split("\t")[0] for line in some] == [key.key for key in all_keys() if key.key.startswith("optimizer.")]
    (key,) = json.loads(told(capsys, "--json", "train.steps"))
    assert key == {"key": "train.steps", "default": "1000", "values": "1 to 10000000000", "meaning": "updates"}


def test_a_terminal_gets_a_table():
    main_end, other_end = pty.openpty()
    command = [sys.executable, "-m", "launcher", "config", "--keys", "slurm.ex"]
    subprocess.run(command, stdout=other_end, check=True, env={**os.environ, "COLUMNS": "80", "TERM": "dumb"})
    os.close(other_end)
    head, row, *_ = os.read(main_end, 10_000).decode().splitlines()
    assert head.split() == ["key", "default", "values", "meaning"]
    assert row.startswith("slurm.exclude  null     text or null  nodes not to use: n3,n[7-9]")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--keys", "optimiser"], "--keys 'optimiser' must be the beginning of a key; did you mean optimizer?"),
        (["--keys", "qqqq"], "--keys 'qqqq' must be the beginning of a key; leave it out to see all of them"),
        ([], "Missing argument 'CONFIG'; see roundtable config --help"),
        (["--keys", "train", "seed=1"], "--keys takes no overrides, and 'seed=1' is one; leave it out"),
    ],
)
def test_a_slip_is_one_line(capsys, arguments, line):
    assert main(["config", *arguments]) == 2
    assert capsys.readouterr().err.splitlines() == [line]
