"""Small tasks of each of the harness's output types, and a run with a tokenizer to evaluate on them."""

import json
from pathlib import Path
from typing import Any

import yaml

from data.config import DataConfig
from data.tokenizer import save_tokenizer
from data.trained_tokenizers import train_tokenizer
from launcher.config.tree import RunConfig, TrainConfig
from modeling.config import FamilyName
from modeling.decoder import Decoder
from modeling.precision_config import Precision
from saved_runs import save_run
from small_models import build, example_config

VOCAB = 300
WORDS = ["ab", "cde", "für", "x", "return", "{}", "0 1", "naïve"]


def records(n: int) -> list[dict[str, Any]]:
    """Questions with three answers of different lengths, and texts, some longer than a context of 48 tokens."""
    found = []
    for number in range(n):
        word, other, last = (WORDS[(number * step + step) % len(WORDS)] for step in (1, 3, 5))
        question = f"{word} {number}: " + " ".join([other] * (number % 5 * 4))
        choices = [f"{last}", f"{other}{word}", f"{word} {number % 3}"]
        found.append(
            {
                "q": question,
                "choices": choices,
                "answer": number % 3,
                "text": f"{question}. {last * number}.",
            }
        )
    return found


KINDS: dict[str, dict[str, Any]] = {
    "pick": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "training_split": "train",
        "num_fewshot": 1,
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    },
    "bare": {  # its contexts are empty, or end with a space
        "output_type": "loglikelihood",
        "doc_to_text": "{{q + ' ' if answer else ''}}",
        "doc_to_target": "{{choices[0]}}",
        "target_delimiter": "",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    "roll": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
        ],
    },
    "make": {
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def write_tasks(folder: Path, *kinds: str, n: int = 12, **more: Any) -> list[Path]:
    """Writes the YAML file of each kind of KINDS, and the documents beside them; returns the files' paths.

    The keys ``more`` are added to each file; ``n`` is the number of test documents.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split, documents in (("test", records(n)), ("train", records(5)[1:])):
        lines = [json.dumps(record) for record in documents]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    paths = []
    for kind in kinds:
        body = {
            "task": kind,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"train": "train.jsonl", "test": "test.jsonl"}},
            "test_split": "test",
            **KINDS[kind],
            **more,
        }
        paths.append(folder / f"{kind}.yaml")
        paths[-1].write_text(yaml.safe_dump(body, allow_unicode=True))
    return paths


def harness_config(path: Path) -> dict[str, Any]:
    """The file's task with full paths of its data files, since the harness's own readers do not know the folder."""
    body = yaml.safe_load(path.read_text())
    files = body["dataset_kwargs"]["data_files"]
    body["dataset_kwargs"]["data_files"] = {split: str(path.parent / name) for split, name in files.items()}
    return body


def save_task_run(
    folder: Path, family: FamilyName = "qwen3_moe", seq_len: int = 48, precision: Precision = "fp32", **dims: Any
) -> tuple[Path, Decoder]:
    """Writes a run directory with a checkpoint and a tokenizer; returns it and the model.

    ``dims`` are changes to the family's example model.
    """
    config = RunConfig(
        model=example_config(family, vocab_size=VOCAB, **dims),
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(precision=precision, micro_batch_size=2),
    )
    model = build(config.model, 1)
    texts = [f"{record['text']} {record['choices'][0]}" for record in records(12)]
    origin = train_tokenizer(texts, VOCAB)  # its tokens may span the boundary of context and continuation

    def save_in(tokenizer: Path) -> None:
        tokenizer.rmdir()
        save_tokenizer(origin, tokenizer)

    save_run(folder / "run", config, model, 5, save_in)
    return folder / "run", model
