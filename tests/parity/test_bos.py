"""`data.add_bos`: the tokenizer's BOS begins each document and each text, once, as `transformers` begins them."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from byte_tokenizer import save_byte_tokenizer
from chats import CHATML, PLAIN, chat_config, messages, save_chat_tokenizer, write_rows
from data.config import DataConfig, SourceConfig
from data.dataset import Dataset, open_dataset
from data.prepare import prepare
from data.shardwriter import PIECE_CHARACTERS
from hf_folders import imported, save_hf_model
from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.tasks.model import RoundtableLM
from launcher.training.init_from import warn_of_beginnings
from modeling.families.config_json import SpecialTokens
from prepare_runs import work_in_this_process
from small_models import example_config
from tokenizers_of_kinds import save_tokenizer_of, special_tokenizer

VOCAB = 512
DOCUMENTS = ["def f(x): return x", "für Käthe", "<s> spelled out </s>", "a " * (PIECE_CHARACTERS // 2 + 9)]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    work_in_this_process(monkeypatch)


def text_config(folder: Path, **more: Any) -> DataConfig:
    source = SourceConfig(path=str(write_rows(folder / "text.jsonl", [{"text": each} for each in DOCUMENTS])))
    places = {"tokenizer": str(folder / "tokenizer"), "token_dir": str(folder / "tokens")}
    return DataConfig(seq_len=24, sources=(source,), heldout_fraction=0.0, add_bos=True, **places, **more)


def opened(config: DataConfig) -> Dataset:
    prepare(config, vocab_size=VOCAB)
    return open_dataset(config, seed=0, vocab_size=VOCAB, split="train")


def documents(dataset: Dataset) -> list[list[int]]:
    (file,) = dataset.files
    return [file.tokens[slice(*file.document_range(number))].tolist() for number in range(file.n_documents)]


def test_documents_are_what_transformers_makes_of_the_texts(tmp_path: Path) -> None:
    """The tokenizer puts BOS before a text by itself, so its own call is the oracle; EOS comes on top."""
    save_tokenizer_of("special", tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", trust_remote_code=False)
    found = documents(opened(text_config(tmp_path)))
    wanted = [tokenizer.encode(text, split_special_tokens=True) for text in DOCUMENTS]
    assert found == [[*ids, tokenizer.eos_token_id] for ids in wanted]
    assert [ids.count(tokenizer.bos_token_id) for ids in found] == [1] * len(DOCUMENTS)


def test_without_it_tokens_and_their_folder_stay_what_they_were(tmp_path: Path) -> None:
    save_tokenizer_of("special", tmp_path / "tokenizer")
    config = text_config(tmp_path)
    with_bos = documents(opened(config))
    without = documents(opened(dataclasses.replace(config, add_bos=False)))
    assert without == [ids[1:] for ids in with_bos]
    assert len(list((tmp_path / "tokens").glob("text-*"))) == 2


def test_a_chat_begins_with_it_once_and_it_is_no_target(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", trust_remote_code=False)
    tokenizer.bos_token = "<pre>"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = write_rows(tmp_path / "chats.jsonl", [{"messages": messages("what is it?", "it is")}])
    for template in (PLAIN, "{{ bos_token }}" + PLAIN):
        config = dataclasses.replace(chat_config(tmp_path, rows, template=template), add_bos=True)
        dataset = opened(config)
        ((begin, *rest),) = documents(dataset)
        assert begin == tokenizer.bos_token_id and begin not in rest
        assert not dataset.masks.of_range(0, 0, 1)[0] and dataset.masks.of_range(0, 0, len(rest) + 1).any()


@pytest.mark.parametrize("packing", ["sequential", "one_document"])
def test_it_stays_the_first_where_the_middle_comes_last(tmp_path: Path, packing: Any) -> None:
    save_chat_tokenizer(tmp_path / "tokenizer", None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", trust_remote_code=False)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    fim = {"fim_rate": 1.0, "fim_tokens": ("<pre>", "<suf>", "<mid>")}
    config = text_config(tmp_path, packing=packing, **fim)
    dataset, bos = opened(config), tokenizer.bos_token_id
    indices = np.arange(dataset.n_samples)
    plain = open_dataset(dataclasses.replace(config, fim_rate=0.0), seed=0, vocab_size=VOCAB, split="train")
    moved, stayed = (each.read(indices).tokens_BS for each in (dataset, plain))
    assert (moved != stayed).any() and (stayed == bos).sum() >= len(DOCUMENTS)
    np.testing.assert_array_equal(moved == bos, stayed == bos)
    assert dataset.fim is not None
    dataset.fim = dataclasses.replace(dataset.fim, bos_id=None)  # planted: BOS is taken for text
    assert ((dataset.read(indices).tokens_BS == bos) != (stayed == bos)).any()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A run directory of an imported model whose tokenizer begins texts with BOS; its model and tokenizer there."""
    folder = tmp_path_factory.mktemp("begun")
    special = special_tokenizer()
    ids = SpecialTokens(bos=special.bos_token_id, eos=special.eos_token_id)
    model = save_hf_model(folder / "hf", example_config("llama", vocab_size=320), tokenizer=False, special=ids)
    special.save_pretrained(folder / "hf")
    assert imported(folder / "hf", folder / "run").config.data.add_bos
    return folder / "run", model, special


def test_an_import_says_whether_its_tokenizer_begins_texts(begun: Any, tmp_path: Path, capsys: Any) -> None:
    save_hf_model(tmp_path / "hf", example_config("llama", vocab_size=257))
    assert not imported(tmp_path / "hf", tmp_path / "run").config.data.add_bos
    assert "add_bos" not in capsys.readouterr().out
    assert main(["import", str(begun[0].parent / "hf"), str(tmp_path / "again")]) == 0
    assert "with data.add_bos: true" in capsys.readouterr().out


@pytest.mark.parametrize("prompt", ["def f", "<s> def f", ""])
def test_what_is_generated_is_what_transformers_generates(begun: Any, prompt: str, capsys: Any) -> None:
    run, model, tokenizer = begun
    ids = tokenizer.encode(prompt.removeprefix("<s>").lstrip())
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, pad_token_id=2)[0]
    arguments = ["generate", str(run), "--prompt", prompt, "--max-new-tokens", "20", "--temperature", "0"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == tokenizer.decode(wanted, skip_special_tokens=True) + "\n"


def test_an_empty_prompt_is_refused_where_no_token_begins_a_text(begun: Any, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(begun[0], tmp_path / "run")
    config = load_config(tmp_path / "run/config.yaml")
    without = dataclasses.replace(config, data=dataclasses.replace(config.data, add_bos=False))
    (tmp_path / "run/config.yaml").write_text(dump_config(without))
    assert main(["generate", str(tmp_path / "run"), "--prompt", ""]) == 2
    line = '--prompt="" must not be empty: the model has only seen how texts go on; try --prompt "def "'
    assert capsys.readouterr().err.splitlines()[-1] == line


def test_the_loss_on_a_text_is_that_of_transformers(begun: Any, tmp_path: Path, capsys: Any) -> None:
    """To 1e-5: both are means of fp32 log-probabilities of the same weights."""
    run, model, tokenizer = begun
    (tmp_path / "text.txt").write_text(DOCUMENTS[0])
    ids = torch.tensor([[*tokenizer.encode(DOCUMENTS[0]), tokenizer.eos_token_id]])
    assert main(["eval", str(run), "--text", str(tmp_path / "text.txt"), "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert ours["tokens"] == ids.shape[1] - 1
    assert ours["loss"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)


def test_inspect_looks_at_the_text_behind_it(begun: Any, capsys: Any) -> None:
    assert main(["inspect", str(begun[0]), "--text", "def f", "--json"]) == 0
    (text,) = json.loads(capsys.readouterr().out)["texts"]
    assert text["tokens"] == begun[2].encode("def f")


def test_contexts_of_tasks_begin_with_it_once(begun: Any, tmp_path: Path) -> None:
    """Where the tokenizer does so by itself nothing changes; a rolled text is predicted after it in any case."""
    save_byte_tokenizer(tmp_path)
    plain, begin = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False), 7

    def reader(tokenizer: Any, begin: int | None) -> RoundtableLM:
        return RoundtableLM(tokenizer, 48, lambda windows: [], begin=begin)

    itself = begun[2]
    both = [reader(itself, each).tok_encode("a text") for each in (None, itself.bos_token_id)]
    assert both[0] == both[1] and both[0][0] == itself.bos_token_id
    ids = plain.encode("a text")
    assert reader(plain, begin).tok_encode("a text") == [begin, *ids]
    assert reader(plain, begin).tok_encode("a text", add_special_tokens=False) == ids
    assert reader(plain, begin)._encode_pair("a", " text") == ([begin, ids[0]], ids[1:])


def test_an_export_whose_tokenizer_does_otherwise_says_so(begun: Any, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(begun[0], tmp_path / "run")
    config = load_config(tmp_path / "run/config.yaml")
    for add_bos in (True, False):
        changed = dataclasses.replace(config, data=dataclasses.replace(config.data, add_bos=add_bos))
        (tmp_path / "run/config.yaml").write_text(dump_config(changed))
        assert main(["export", str(tmp_path / "run"), str(tmp_path / f"out-{add_bos}")]) == 0
        told = "before documents (data.add_bos=false), and the exported tokenizer adds one to each text; remove it"
        assert (told in capsys.readouterr().err) != add_bos


def test_a_run_that_begins_documents_otherwise_than_its_init_from_is_warned(begun: Any, capsys: Any) -> None:
    theirs = load_config(begun[0] / "config.yaml")
    for add_bos in (True, False):
        ours = dataclasses.replace(
            theirs, init_from=str(begun[0]), data=dataclasses.replace(theirs.data, add_bos=add_bos)
        )
        warn_of_beginnings(ours)
        told = f"warning: data.add_bos=false, and it was true in the run of init_from={begun[0]}"
        assert capsys.readouterr().err.startswith(told) != add_bos
    warn_of_beginnings(dataclasses.replace(ours, init_from=str(begun[0] / "deleted")))  # by its own run, meanwhile
    assert capsys.readouterr().err == ""


def test_a_tokenizer_without_one_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    save_byte_tokenizer(tmp_path / "bytes")
    wanted = f"sources=[{{path: {tmp_path}/text.txt}}]"
    for named, rule in (
        ("null", "data.add_bos=true needs a tokenizer with a bos_token, and data.tokenizer=null names none"),
        (str(tmp_path / "bytes"), "has no bos_token, which begins each document"),
    ):
        config = tmp_path / "config.yaml"
        config.write_text(f"name: a\nmodel: {{vocab_size: 512}}\ndata: {{token_dir: {tmp_path}/tokens}}\n")
        arguments = [str(config), f"data.{wanted}", "data.add_bos=true", f"data.tokenizer={named}"]
        assert main(["prepare", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert rule in line and "data.add_bos=true" in line
        assert not (tmp_path / "tokens").exists()
