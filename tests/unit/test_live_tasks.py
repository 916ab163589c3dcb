"""train.eval_tasks: what is wrong is refused by `train`, and by its --dry-run, before anything is created."""

from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from launcher.cli import main
from launcher.config.load import load_config
from launcher.tasks.load import Asked
from launcher.training.live_tasks import requests_of
from task_runs import write_tasks


def config(folder: Path, *tasks: Path | str, seq_len: int = 16) -> Path:
    """A config on a folder's text, the tokens of which are not there yet."""
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("for item in items:\n    print(item)\n" * 40)
    names = ", ".join(map(str, tasks))
    path = folder / "run.yaml"
    path.write_text(
        f"run_dir: {folder}/run\nmodel: {{vocab_size: 300, d_model: 16, n_layers: 1, n_heads: 2, n_kv_heads: 1}}\n"
        f"data: {{seq_len: {seq_len}, token_dir: {folder}/tokens, sources: [{{path: {folder}/text}}]}}\n"
        f"train: {{steps: 1, global_batch_size: 1, precision: fp32, eval_tasks: [{names}]}}\n"
    )
    return path


def refused(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> str:
    """The one line of `train`, and of --dry-run; nothing is created."""
    before = sorted(path.parent.rglob("*"))
    assert main(["train", str(path), "--ranks", "1", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert main(["train", str(path), "--ranks", "1", "--dry-run", *arguments]) == 2
    assert line in capsys.readouterr().err.splitlines()
    assert sorted(path.parent.rglob("*")) == before
    return line


@pytest.mark.parametrize(
    ("kind", "more", "told"),
    [
        ("make", {}, "train.eval_tasks: make generates text (output_type: generate_until)"),
        ("pick", {"process_docs": "tools.run"}, "is not a key that is plain data; leave it out, or evaluate it with"),
        ("pick", {"doc_to_target": "{{nothing}}"}, "'nothing' is undefined"),
        ("pick", {"num_fewshot": 9}, "takes 9 examples, and its fewshot_split has 4; lower num_fewshot in its file"),
        ("pick", {"dataset_kwargs": {"data_files": {"test": "gone.jsonl"}}}, "gone.jsonl is not there"),
    ],
)
def test_a_wrong_task_is_one_line(
    kind: str, more: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = write_tasks(tmp_path / "own", kind, **more)
    assert told in refused(capsys, config(tmp_path, path))


def test_a_task_that_is_gone_or_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, "gone.yaml")
    assert refused(capsys, path).startswith("train.eval_tasks=gone.yaml is no file")
    line = refused(capsys, path, "train.eval_tasks=[hellaswagg]")
    assert line.startswith("train.eval_tasks=hellaswagg is no task of lm-evaluation-harness; near it are hellaswag")


def test_a_missing_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name))
    line = refused(capsys, config(tmp_path, *write_tasks(tmp_path / "own", "pick")))
    assert line.startswith("train.eval_tasks needs lm-evaluation-harness, which is not installed")


@pytest.mark.slow
def test_a_continuation_longer_than_a_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told once there is a tokenizer, and before there is a run directory."""
    (path,) = write_tasks(tmp_path / "own", "bare", doc_to_target="{{q * 20}}")
    path = config(tmp_path, path)
    assert main(["train", str(path), "--ranks", "1"]) == 2
    assert "tokens, and the model sees 16 at once; shorten it" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists() and load_config(path).train.eval_tasks


def test_requests_are_made_without_a_semaphore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed would leave it, and multiprocessing would print that it leaked."""
    made: list[Any] = []
    monkeypatch.delattr(tqdm, "_lock", raising=False)
    monkeypatch.setattr(SemLock, "__init__", lambda *arguments, **options: made.append(arguments))
    requests = requests_of(Asked(tuple(map(str, write_tasks(tmp_path, "pick", "roll"))), "train.eval_tasks"))
    assert len(requests.instances) == 2
    assert made == []
