"""Shell completion: what is offered for keys, values, runs and checkpoints, in bash itself, and how quickly."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.completion import PLAIN, all_keys, offer_checkpoints, values_of
from launcher.config.load import load_config


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("name: x\n")
    for name in ("first", "fine-tune", "$(touch owned)", "a b", "*"):
        (tmp_path / "runs" / name / "checkpoints" / "step-00000010").mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    return tmp_path


def complete(*words: str) -> list[str]:
    """What bash is offered, by the function that `completion bash` prints."""
    script = (
        'PATH="$BIN:$PATH"; source <(roundtable completion bash)\n'
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _roundtable_completion roundtable; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "BIN": str(Path(sys.executable).parent)}
    arguments = ["bash", "--norc", "-c", script, "bash", "roundtable", *words]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["train", "c.yaml", "parallel.ze"], ["parallel.zero=", "parallel.zero=1"]),
        (["train", "c.yaml", "optimizer.name", "="], ["adamw", "sgd", "muon"]),  # bash takes key=value apart
        (["train", "c.yaml", "seed", "=", "1", "optimizer.name", "=", "s"], ["sgd"]),
        (["status", "fi"], ["fine-tune", "first"]),
        (["plot", "first", "runs/fi"], ["runs/fine-tune", "runs/first"]),
        (["eval", "runs/first/"], ["runs/first/checkpoints/step-00000010"]),
        (["train", "c."], []),  # files, by the shell
        (["import", "c."], []),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
)
def test_bash_is_offered(folder, words, offered):
    assert complete(*words) == offered
    assert not (folder / "owned").exists()


def test_keys_and_values_are_those_of_the_config(folder):
    keys = all_keys()
    assert {"parallel.tp", "model.moe.balance.rate", "name", "metrics.wandb.mode"} <= set(keys)
    assert values_of("optimizer.name") == ["adamw", "sgd", "muon"]
    assert values_of("parallel.pipeline.name") == ["1f1b", "interleaved", "zbv", "dualpipev"]
    assert values_of("train.deterministic") == ["false", "true"]
    assert values_of("checkpoint.every_steps") == ["null"]
    assert values_of("no.such.key") == []


def test_sections_that_may_be_null_are_keys_with_that_value(folder):
    keys = all_keys()
    sections = [key for key in keys if any(each.startswith(f"{key}.") for each in keys)]
    assert {"model.moe", "model.rope_scaling", "data.cleaning"} <= set(sections)
    for key in sections:
        assert values_of(key) == ["null"]
        load_config(folder / "c.yaml", [f"{key}=null"])


@pytest.mark.parametrize(
    "key", ["train.precision", "optimizer.name", "schedule.name", "metrics.wandb.mode", "parallel.cp"]
)
def test_offered_values_load(folder, key):
    for value in values_of(key):
        load_config(folder / "c.yaml", [f"{key}={value}"])


def test_only_plain_names_are_offered(folder):
    found = [*offer_checkpoints("runs/"), *offer_checkpoints("")]
    assert sorted(set(found)) == ["runs/fine-tune", "runs/first"]
    assert all(PLAIN.fullmatch(path) for path in found)


@pytest.mark.parametrize("words", [["train", "c.yaml", "parallel."], ["status", ""]])
def test_completion_imports_little_and_no_heavy_library(folder, words):
    """A press of Tab waits for what is imported: typer's 144 modules were 0.07 s, these 330 0.19 s (2026-11-23)."""
    script = "import sys; from launcher.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    words = ["roundtable", *words]
    environment = {**os.environ, "_ROUNDTABLE_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words)}
    environment["COMP_CWORD"] = str(len(words) - 1)
    usual = run_python("import sys, typer; print(*sys.modules)", environment).stdout.split()
    done = run_python(script, environment)
    assert done.returncode == 0 and done.stdout
    imported = done.stderr.split()
    assert not {"torch", "transformers", "ruamel.yaml", "numpy"} & set(imported)
    assert len(imported) < 3 * len(usual)


def run_python(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
