"""Tokenizers and chat templates of models that are imported: what was trained with is what is exported."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GemmaTokenizer

from byte_tokenizer import save_byte_tokenizer
from data.chat_template import template_of
from data.config import ChatConfig, SourceConfig
from hf_folders import imported, save_hf_model
from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from small_models import example_config


def tokenizer_of_bytes(folder: Path) -> Any:
    save_byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def test_several_chat_templates_there_and_back(tmp_path: Path) -> None:
    """As tool-calling models have them: transformers saves them in a folder of their own."""
    templates = {"default": "{{ messages[0].content }}", "tool_use": "tools: {{ messages[0].content }}"}
    save_hf_model(tmp_path / "source", example_config("llama", vocab_size=257), tokenizer=False)
    tokenizer = tokenizer_of_bytes(tmp_path / "bytes")
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(tmp_path / "source")
    trained = imported(tmp_path / "source", tmp_path / "run")
    assert trained.tokenizer is not None and template_of(ChatConfig(), trained.tokenizer) == templates["default"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "again", trust_remote_code=False).chat_template == templates


@pytest.mark.parametrize("owned", ["none", "one", "several"])
def test_the_chat_template_that_a_run_trained_with_is_exported(owned: str, tmp_path: Path, capsys) -> None:
    """In the place of those that the tokenizer came with; where sources have several, none of them is."""
    own = {"none": None, "one": "{{ 1 }}", "several": {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}}[owned]
    save_hf_model(tmp_path / "source", example_config("llama", vocab_size=257), tokenizer=False)
    tokenizer = tokenizer_of_bytes(tmp_path / "bytes")
    tokenizer.chat_template = own
    tokenizer.save_pretrained(tmp_path / "source")
    imported(tmp_path / "source", tmp_path / "run")
    config, mine = (
        load_config(tmp_path / "run/config.yaml"),
        SourceConfig(path="a", chat=ChatConfig(template="ü {{ 3 }}")),
    )
    capsys.readouterr()
    for name, sources, wanted in (
        ("mine", [mine, SourceConfig(path="b"), dataclasses.replace(mine, path="c")], "ü {{ 3 }}"),
        ("its own", [SourceConfig(path="a", chat=ChatConfig())], own),
        ("both", [mine, SourceConfig(path="b", chat=ChatConfig())], own),
    ):
        changed = dataclasses.replace(config, data=dataclasses.replace(config.data, sources=tuple(sources)))
        (tmp_path / "run/config.yaml").write_text(dump_config(changed))
        assert main(["export", str(tmp_path / "run"), str(tmp_path / name)]) == 0
        assert ("several chat templates" in capsys.readouterr().err) == (name == "both")
        assert AutoTokenizer.from_pretrained(tmp_path / name, trust_remote_code=False).chat_template == wanted


def test_the_side_that_a_tokenizer_s_class_pads_is_kept(tmp_path: Path) -> None:
    """Gemma's and Llama's classes pad on the left, the general one of an export on the right."""
    save_hf_model(tmp_path / "source", example_config("gemma2", vocab_size=257), tokenizer=False)
    vocab = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "\u2581": 4, "a": 5, "b": 6}
    GemmaTokenizer(vocab=vocab, merges=[]).save_pretrained(tmp_path / "source")
    imported(tmp_path / "source", tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    loaded = [AutoTokenizer.from_pretrained(tmp_path / name, trust_remote_code=False) for name in ("source", "again")]
    padded = [each(["a", "a b a"], padding=True)["input_ids"] for each in loaded]
    assert padded[0] == padded[1] and padded[0][0][0] == 0
