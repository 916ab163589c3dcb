"""`eval --text`: what a model makes of text that is given, against its own probabilities; and what is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.nn import functional as F

from byte_tokenizer import save_byte_tokenizer
from data.config import DataConfig
from data.tokenizer import load_fast, load_origin, save_tokenizer
from data_reference import write_token_file
from inspect_runs import inspectable
from launcher.cli import main
from launcher.commands.trained import open_trained
from launcher.config.tree import RunConfig, TrainConfig
from launcher.training.run_parts import STARTED_IN
from modeling.context import Context
from modeling.decoder import Decoder
from saved_runs import save_run
from sealed import record_of
from small_models import build, example_config

DOCUMENTS = ["def f(x):\n    return x\n", "für Käthe", "a" * 70, ""]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoder]:
    """A run directory with a checkpoint, and its model."""
    folder = tmp_path_factory.mktemp("evaluated")
    return folder, saved_model(folder, DataConfig(seq_len=1000))


def saved_model(folder: Path, data: DataConfig) -> Decoder:
    """Makes ``folder`` a run directory with a checkpoint; returns its model."""
    config = RunConfig(
        model=example_config("qwen3_moe", vocab_size=257),
        data=data,
        train=TrainConfig(precision="fp32", micro_batch_size=2),
    )
    model = build(config.model, 1)
    (folder / "origin").mkdir()
    save_byte_tokenizer(folder / "origin")
    origin = load_origin(str(folder / "origin"))

    def save_in(tokenizer: Path) -> None:
        tokenizer.rmdir()  # what is there already stays as it is
        save_tokenizer(origin, tokenizer)

    save_run(folder, config, model, 5, save_in)
    return model


def list_tokenizer(directory: Path) -> Callable[[dict[str, Any]], None]:
    """A change of the manifest's JSON by which it lists what is in the tokenizer's folder now."""

    def change(body: dict[str, Any]) -> None:
        files = {name: record for name, record in body["files"].items() if not name.startswith("tokenizer/")}
        here = directory.glob("tokenizer/*")
        body["files"] = files | {path.relative_to(directory).as_posix(): record_of(path) for path in here}

    return change


@torch.no_grad()
def nats(model: Decoder, folder: Path, document: str) -> tuple[float, int]:
    """What predicting the document and its end costs, each token but the first from those before it; and the tokens."""
    tokenizer = load_fast(folder / "checkpoints/step-00000005/tokenizer")
    ids_BS = torch.tensor([[*tokenizer.encode(document).ids, 0]])
    positions_BS = torch.arange(ids_BS.shape[1])[None]
    logits_BSV = model(ids_BS, Context(positions_BS, torch.zeros_like(ids_BS))).logits_BSV
    return float(F.cross_entropy(logits_BSV[0, :-1], ids_BS[0, 1:], reduction="sum")), ids_BS.shape[1] - 1


def test_the_loss_is_the_models_own(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each document by itself: to 1e-6, since sums are in another order."""
    folder, model = run
    lines = [json.dumps({"body": document}) for document in DOCUMENTS]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["eval", str(folder), "--text", str(tmp_path / "text.jsonl"), "--text-key", "body", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    costs = [nats(model, folder, document) for document in DOCUMENTS if document]
    total, n_tokens = (sum(column) for column in zip(*costs, strict=True))
    n_bytes = sum(len(document.encode()) for document in DOCUMENTS)
    assert (found["step"], found["tokens"], found["documents"], found["bytes"]) == (5, n_tokens, 3, n_bytes)
    assert found["loss"] == pytest.approx(total / n_tokens, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(total / n_tokens), rel=1e-5)


@pytest.mark.parametrize("packing", ["best_fit", "one_document"])
def test_documents_are_packed_as_in_training(
    packing: Literal["best_fit", "one_document"], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No document that fits into a sequence is cut, wherever in the file it stands."""
    documents = [*DOCUMENTS[:2], "the last one is longer than what the first two leave of a sequence"]
    (tmp_path / "run").mkdir()
    model = saved_model(tmp_path / "run", DataConfig(seq_len=72, packing=packing))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    assert main(["eval", str(tmp_path / "run"), "--text", str(tmp_path / "text.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    costs = [nats(model, tmp_path / "run", document) for document in documents]
    total, n_tokens = (sum(column) for column in zip(*costs, strict=True))
    assert found["tokens"] == n_tokens
    assert found["loss"] == pytest.approx(total / n_tokens, rel=1e-6)


def test_a_text_file_is_one_document(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(DOCUMENTS[0])
    assert main(["eval", str(run[0]), "--text", str(tmp_path / "a.txt")]) == 0
    told = capsys.readouterr()
    assert "bits a byte" in told.out and "of 1 documents, 23 bytes" in told.out
    assert told.err == ""


@pytest.mark.parametrize(
    ("name", "content", "options", "told"),
    [
        ("empty.txt", b"", [], "holds no token to predict"),
        ("null.jsonl", b'{"text": ""}\n\n', [], "holds no token to predict"),
        ("picture.png", b"\x89PNG\0\0", [], "is not text"),
        ("absent.txt", None, [], "does not exist"),
        ("bad.jsonl", b"{", [], "is not JSON"),
        ("other.jsonl", b'{"body": "a"}\n', [], "--text-key='text' is not in a record"),
        ("bad.parquet", b"PAR1", [], "parquet"),
        ("some.txt", b"text", ["--sequences", "4"], "--sequences does not go with --text"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    name: str,
    content: bytes | None,
    options: list[str],
    told: str,
    run: tuple[Path, Decoder],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["eval", str(run[0]), "--text", str(path), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line and (str(path) in line or options)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("", "--text='' must not be empty; "),
        ("x" * 256, "must have names of at most 255 bytes"),
        ("s3://bucket/x", "--text='s3://bucket/x' must be text, and is token files, or a URL of such"),
        ("hf://", "--text='hf://' "),
        ("PREFIX", "must be text, and is token files"),
    ],
)
def test_what_is_no_path_of_text_is_one_line(
    path: str, told: str, run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_token_file(tmp_path / "a", [[1, 2]])
    (tmp_path / "a").write_text("text, whose name is that of token files, too")
    assert main(["eval", str(run[0]), "--text", path.replace("PREFIX", str(tmp_path / "a"))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line and "; " in line


def test_a_dataset_that_save_to_disk_wrote_is_read(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["def f(x):", "abc"]}).save_to_disk(tmp_path / "saved")
    assert main(["eval", str(run[0]), "--text", f"hf://{tmp_path}/saved"]) == 0
    assert "of 2 documents, 12 bytes" in capsys.readouterr().out


def test_a_checkpoint_without_a_tokenizer(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    bare = tmp_path / "bare"
    save_run(bare, open_trained(run[0]).config, run[1], 5, lambda tokenizer: None)
    assert main(["eval", str(bare), "--text", str(tmp_path / "a.txt")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"CHECKPOINT={bare} holds no tokenizer")


@pytest.mark.parametrize("command", [["eval", "RUN"], ["data", "show", "RUN", "--step", "1"]])
def test_where_the_folder_of_the_start_is_gone_absolute_paths_are_read_and_others_are_told(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = inspectable(tmp_path, sources=True, run_dir=str(tmp_path / "run"))
    (path / STARTED_IN).write_text(f"{tmp_path}/gone\n")
    asked = [word.replace("RUN", str(path)) for word in command]
    assert main(asked) == (0 if command[0] == "eval" else 2)
    assert "gone" not in capsys.readouterr().err  # `data` asks for a step that the run has no record of
    config = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(config.replace(f"{tmp_path}/tokens", "tokens"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    capsys.readouterr()
    assert main(asked) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("data.token_dir='tokens'")
    assert f"(relative paths are read from {tmp_path}/here: {tmp_path}/gone, where the run was started, is gone" in line
    assert line.endswith("; give the command where the data lies)")


def test_planted_documents_run_together_are_seen(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text in which one document follows another without a boundary costs something else."""
    folder, model = run
    (tmp_path / "a.txt").write_text("".join(DOCUMENTS))
    assert main(["eval", str(folder), "--text", str(tmp_path / "a.txt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    total = sum(nats(model, folder, document)[0] for document in DOCUMENTS if document)
    assert abs(found["loss"] * found["tokens"] / total - 1) > 1e-3


def test_a_field_without_a_file_is_refused(run: tuple[Path, Decoder], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run[0]), "--text-key", "body"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "--text-key=body works with --text only, whose records it is of; leave it out"
