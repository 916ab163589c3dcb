"""Chats as token files: which tokens are targets, against `transformers`, and what is refused."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

import data.chat_tokens
import data.workers
from chats import (
    CALLING,
    CHATML,
    FORGETFUL,
    MARKED,
    PLAIN,
    calling,
    chat_config,
    messages,
    save_chat_tokenizer,
    write_rows,
)
from data.config import SourceConfig
from data.dataset import Dataset, open_dataset
from data.errors import DataError
from data.file_records import records_of_files
from data.prepare import prepare
from data.prepared import find_prepared
from data.shards import Slice
from data.shardtask import ShardTask
from data.tally import Tally
from data.tokenizer import tokenizer_folder
from data.tokenizer_setup import set_up_tokenizer
from launcher.cli import main
from prepare_runs import work_in_this_process

VOCAB = 512


@pytest.fixture(autouse=True)
def _in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the test of workers."""
    if "workers" not in request.node.name:
        work_in_this_process(monkeypatch)


CHATS = [
    messages("what is it?", "it is  \n ünïcödé, that"),
    messages("a", "b", "c", "the answer\n\n", system="be brief"),
    messages("only a question", "yes", "and another one"),
    messages("?" * 50, "an answer that is longer than a sample is, by a few words more than would do"),
]


def opened(folder: Path, rows: list[Any], own: str | None = CHATML, **more: Any) -> Dataset:
    """Prepared with a tokenizer whose own template is ``own``."""
    save_chat_tokenizer(folder / "tokenizer", own)
    config = chat_config(folder, write_rows(folder / "chats.jsonl", rows), **more)
    prepare(config, vocab_size=VOCAB)
    return open_dataset(config, seed=0, vocab_size=VOCAB, split="train")


def documents(dataset: Dataset) -> list[tuple[list[int], list[bool]]]:
    """Each document's ids, and which of them are targets."""
    found = []
    for number, file in enumerate(dataset.files):
        for document in range(file.n_documents):
            first, stop = file.document_range(document)
            found.append((file.tokens[first:stop].tolist(), dataset.masks.of_range(number, first, stop).tolist()))
    return found


def from_transformers(folder: Path, chats: list[Any], template: str) -> list[tuple[list[int], list[bool]]]:
    """The same by `transformers` alone, which adds no end of text."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    told = [
        tokenizer.apply_chat_template(
            chat, chat_template=template, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        for chat in chats
    ]
    return [(each["input_ids"], [bool(mask) for mask in each["assistant_masks"]]) for each in told]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["message by message", "marked"])
def test_the_targets_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    """The end of text that preparation adds comes on top; it is no target after a line break, which is none."""
    found = documents(opened(tmp_path, [{"messages": chat} for chat in CHATS], template))
    expected = from_transformers(tmp_path, CHATS, MARKED)
    assert found == [([*ids, 0], [*mask, False]) for ids, mask in expected]
    assert all(0 < sum(mask) < len(mask) for _, mask in found)


def test_planted_a_mask_that_ends_a_token_early_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_chat_tokenizer(tmp_path / "tokenizer")
    config = chat_config(tmp_path, write_rows(tmp_path / "chats.jsonl", [{"messages": chat} for chat in CHATS]))
    folder = set_up_tokenizer(config, VOCAB, [])
    assert folder == tokenizer_folder(config, VOCAB) and folder is not None
    piece = Slice(config.sources[0].path, "jsonl", 0, 1 << 20, 1 << 20)
    task = ShardTask(tmp_path, 0, (piece,), config.sources[0], "key", folder, 0.0, None)

    def tokenized() -> list[list[bool]]:
        chats = data.chat_tokens.tokenize_chats(task, lambda *_: None, lambda: False, Tally(0.0))
        return [mask.tolist()[:-1] for _, _, mask in chats if mask is not None]

    expected = [mask for _, mask in from_transformers(tmp_path, CHATS, MARKED)]
    assert tokenized() == expected
    n_after_end = data.chat_tokens.ChatTokens._n_after_end
    monkeypatch.setattr(data.chat_tokens.ChatTokens, "_n_after_end", lambda *each: n_after_end(*each) + 1)
    assert tokenized() != expected


def test_a_template_without_a_prompt_for_answers_begins_them_with_their_content(tmp_path: Path) -> None:
    ((ids, mask),) = documents(opened(tmp_path, [{"messages": messages("hi", "the answer", "x")}], PLAIN))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", trust_remote_code=False)
    targets = [token for token, is_target in zip(ids, mask, strict=True) if is_target]
    assert tokenizer.decode(targets) == " the answer<|endoftext|>"
    assert tokenizer.decode(ids) == "[INST] hi [/INST] the answer<|endoftext|>[INST] x [/INST]<|endoftext|>"


def test_a_prompt_with_its_completion_needs_no_template(tmp_path: Path) -> None:
    """Text is put together as it is. Messages go through the template; answers among the given ones are no targets."""
    rows = [
        {"prompt": "Q: what is it?\nA:", "completion": " that"},
        {"prompt": messages("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]},
    ]
    text, chat = documents(opened(tmp_path, rows))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", trust_remote_code=False)
    assert text[0] == [*tokenizer("Q: what is it?\nA:")["input_ids"], *tokenizer(" that")["input_ids"], 0]
    assert text[1] == [False] * len(tokenizer("Q: what is it?\nA:")["input_ids"]) + [True] * (
        len(tokenizer(" that")["input_ids"]) + 1
    )
    assert tokenizer.decode([token for token, is_target in zip(*chat, strict=True) if is_target]) == "d<|im_end|>"


def test_all_tokens_may_be_targets_and_text_keeps_the_files_that_it_had(tmp_path: Path) -> None:
    dataset = opened(tmp_path, [{"messages": chat} for chat in CHATS], targets="all")
    assert not dataset.masks.any and not list(tmp_path.glob("tokens/*/*.mask"))
    (manifest,) = tmp_path.glob("tokens/chats*/manifest.json")
    tree = json.loads(manifest.read_text())
    assert tree["format"] == 1
    assert list(tree["train"][0]) == [
        *("name", "n_tokens", "n_documents", "largest_id", "bin_bytes", "idx_bytes", "bin_xxh3", "idx_xxh3")
    ]


def test_a_manifest_with_masks_is_of_a_format_that_earlier_readers_refuse(tmp_path: Path) -> None:
    opened(tmp_path, [{"messages": chat} for chat in CHATS])
    (manifest,) = tmp_path.glob("tokens/chats*/manifest.json")
    assert json.loads(manifest.read_text())["format"] == 2
    config = chat_config(tmp_path, tmp_path / "chats.jsonl")
    prepared = find_prepared(config, VOCAB)
    assert prepared is not None and prepared.sources[0].manifest is not None
    (file,) = prepared.sources[0].manifest.files()
    (recorded,) = records_of_files(config, prepared)["data.sources[0]"].values()
    assert recorded["mask"] == file.mask_xxh3 is not None  # so a run would see another one
    (mask,) = tmp_path.glob("tokens/*/*.mask")
    mask.write_bytes(mask.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"\.mask has \d+ bytes but the manifest records"):
        open_dataset(config, seed=0, vocab_size=VOCAB, split="train")
    mask.unlink()
    with pytest.raises(DataError, match=r"\.mask is missing"):
        open_dataset(config, seed=0, vocab_size=VOCAB, split="train")


@pytest.mark.parametrize("packing", ["sequential", "best_fit", "one_document"])
@pytest.mark.parametrize("left_out", [False, True])
def test_counts_are_those_of_the_batches(tmp_path: Path, packing: str, left_out: bool) -> None:
    """And a sample's targets are those of the documents that it holds, token for token."""
    dataset = opened(tmp_path, [{"messages": chat} for chat in CHATS * 3], packing=packing)
    if left_out:
        names = [{"document": dataset.document_names.of_document(0, number)} for number in (1, 4)]
        from data.without import parse_list

        dataset.leave_out(parse_list("\n".join(map(json.dumps, names)).encode(), "x"), "x")
    indices = np.arange(dataset.n_samples)
    batch = dataset.read(indices)
    following, targets = batch.next_BS, batch.targets_BS
    assert following is not None
    assert dataset.count(indices)[0] == (targets >= 0).sum() > 0
    assert (targets[targets >= 0] == following[targets >= 0]).all() and (following >= 0).sum() > (targets >= 0).sum()
    for k, count in enumerate(dataset.count_further(indices, 3), 1):
        same = batch.documents_BS[:, :-k] == batch.documents_BS[:, k:]
        assert count == ((targets[:, k:] >= 0) & same).sum()
    row_F, file_F, first_F, stop_F, offset_F = dataset.fragments(indices)
    for row, file, first, stop, offset in zip(row_F, file_F, first_F, stop_F, offset_F, strict=True):
        counts = dataset.masks.of_range(file, first + 1, stop)  # of the part's tokens, but for the first
        if dataset.left_out.holds(int(file), int(first)):
            counts = np.zeros_like(counts)
        assert ((targets[row, offset : offset + stop - first - 1] >= 0) == counts).all()


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet", "chats.feather", "hf"])
def test_calls_of_tools_are_written_as_transformers_writes_them(tmp_path: Path, name: str) -> None:
    """Columns give each call the arguments of all others, and each tool their parameters, as nulls."""
    rows = [calling("weather", city="Rome"), calling("add", a="1", b="2"), {"messages": messages("hi", "yes")}]
    path = tmp_path / name
    if name == "hf":
        path.mkdir()
        pa.parquet.write_table(pa.Table.from_pylist(rows), path / "chats.parquet")
    elif name == "chats.parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif name == "chats.feather":
        pa.feather.write_feather(pa.Table.from_pylist(rows), str(path))
    else:
        write_rows(path, rows)
    save_chat_tokenizer(tmp_path / "tokenizer", CALLING)
    config = chat_config(tmp_path, f"hf://{path}" if name == "hf" else path)
    prepare(config, vocab_size=VOCAB)
    found = documents(open_dataset(config, seed=0, vocab_size=VOCAB, split="train"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", trust_remote_code=False)
    told = [tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False) for row in rows]
    assert [ids for ids, _ in found] == [[*ids, 0] for ids in told]
    targets = tokenizer.decode([token for token, is_target in zip(*found[0], strict=True) if is_target])
    assert targets == '{"function": {"name": "weather", "arguments": {"city": "Rome"}}}<|im_end|>it is<|im_end|>'


@pytest.mark.slow
def test_workers_shards_and_formats_change_no_byte(tmp_path: Path) -> None:
    """jsonl, parquet, Arrow; one worker or two."""
    rows = [{"id": n, "messages": chat} for n, chat in enumerate(CHATS * 5)]
    save_chat_tokenizer(tmp_path / "tokenizer")
    write_rows(tmp_path / "a.jsonl", rows)
    table = pa.Table.from_pylist(rows)
    pa.parquet.write_table(table, tmp_path / "b.parquet")
    pa.feather.write_feather(table, str(tmp_path / "c.arrow"), compression="uncompressed")
    found = []
    for name, workers in ("a.jsonl", 1), ("a.jsonl", 2), ("b.parquet", 1), ("c.arrow", 1):
        config = chat_config(tmp_path, tmp_path / name, shard_bytes=900 if workers == 2 else 64_000_000)
        config = dataclasses.replace(config, workers=workers, token_dir=str(tmp_path / f"{name}-{workers}"))
        prepare(config, vocab_size=VOCAB)
        found.append(documents(open_dataset(config, seed=0, vocab_size=VOCAB, split="train")))
    assert found[1:] == found[:1] * 3


def test_a_template_in_the_config_goes_before_the_tokenizers(tmp_path: Path) -> None:
    ((ids, _),) = documents(opened(tmp_path, [{"messages": messages("hi", "yes")}]))
    config = chat_config(tmp_path, tmp_path / "chats.jsonl", template=PLAIN)
    prepare(config, vocab_size=VOCAB)
    ((other, _),) = documents(open_dataset(config, seed=0, vocab_size=VOCAB, split="train"))
    assert other != ids


UNUSABLE = {
    "no messages": ({"text": "a"}, CHATML, {}, r"data.sources\[0\].chat.messages_key='messages' and .completion_key="),
    "no role": ({"messages": [{"content": "a"}]}, CHATML, {}, r"message 1 has none; mend it"),
    "no content": ({"messages": [{"role": "user"}]}, CHATML, {}, r"must give each message text as content"),
    "no answer": ({"messages": messages("a")}, CHATML, {}, r"holds no message of role assistant"),
    "half text": ({"prompt": "a", "completion": messages("b")}, CHATML, {}, r"must hold prompt and completion both"),
    "an end spelled out": (
        {"messages": messages("a<|im_end|>", "b")},
        CHATML,
        {},
        r"data.sources\[0\]: record 2 from .*chats.jsonl on, which begins 'a<\|im_end\|> b' spells out <\|im_end\|>",
    ),
    "an end spelled out in a role": (
        {"messages": [{"role": "user<|im_end|>", "content": "a"}, *messages("c", "d")[1:]]},
        CHATML,
        {},
        r"which begins 'a d' spells out <\|im_end\|>, a special token of the tokenizer, in a message or its tools",
    ),
    "an end spelled out in reasoning": (
        {"messages": [*messages("a"), {"role": "assistant", "content": "b", "reasoning_content": "evil<|im_end|>"}]},
        CHATML,
        {},
        r"which begins 'a b' spells out <\|im_end\|>",
    ),
    "an end spelled out in a call": (
        {
            "messages": [
                *messages("a"),
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"<|im_end|>": 1}}}]},
            ]
        },
        CHATML,
        {},
        r"which begins 'a' spells out <\|im_end\|>",
    ),
    "an end spelled out in a tool": (
        {"messages": messages("a", "b"), "tools": [{"function": {"name": "f", "description": "<|im_end|>"}}]},
        CHATML,
        {},
        r"which begins 'a b' spells out <\|im_end\|>",
    ),
    "going back": (
        {"messages": messages("why", "<think>so</think>that", "and", "this")},
        FORGETFUL,
        {},
        r"data.sources\[0\].chat: the template renders the first 2 messages otherwise when more follow "
        r"\(record 2 from .*chats.jsonl on, which begins 'why <think>so</think>that and this'\) so which tokens",
    ),
    "no template": ({"messages": messages("a", "b")}, None, {}, r"data.sources\[0\].chat.template=null needs a templ"),
    "not jinja": (
        {"messages": messages("a", "b")},
        None,
        {"template": "{% if", "max_bad_share": 0.5},
        r"data.sources\[0\].chat.template='{% if' is no jinja template: line 1: .*; mend it, or set it to null for",
    ),
    "not jinja, of the tokenizer": (
        {"messages": messages("a", "b")},
        "{{ messages[0 }}",
        {},
        r"data.sources\[0\].chat.template=null: that of .*tokenizer-.* is no jinja template: line 1: unexpected '}'",
    ),
    "a clock": (
        {"messages": messages("a", "b")},
        None,
        {"template": "{{ strftime_now('%d') }}" + CHATML},
        r"the template cannot render it \('str' object is not callable",
    ),
    "out of the sandbox": (
        {"messages": messages("a", "b")},
        None,
        {"template": "{{ messages.__class__.__base__.__subclasses__() }}"},
        r"the template cannot render it \(access to attribute '__class__' of 'list' object is unsafe",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_used_is_named_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    row, template, more, line = UNUSABLE[name]
    good = {"prompt": "so", "completion": "what"}
    with pytest.raises(DataError, match=line) as caught:
        opened(tmp_path, [good, row], template, **more)
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("more", [{}, {"template": "{% if"}], ids=["none", "broken"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "named"])
def test_an_unusable_template_is_refused_before_another_source_is_tokenized(
    tmp_path: Path, trained: bool, more: dict[str, str]
) -> None:
    (tmp_path / "text.txt").write_text("some text that comes first\n")
    save_chat_tokenizer(tmp_path / "tokenizer", None)
    config = chat_config(tmp_path, write_rows(tmp_path / "chats.jsonl", [{"messages": messages("a", "b")}]), **more)
    text, tokenizer = SourceConfig(path=str(tmp_path / "text.txt")), None if trained else config.tokenizer
    config = dataclasses.replace(config, sources=(text, *config.sources), tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"^data.sources\[1\].chat.template="):
        prepare(config, vocab_size=VOCAB)
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("name", ["going back", "no template", "an end spelled out"])
def test_the_command_tells_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    row, template, _, line = UNUSABLE[name]
    save_chat_tokenizer(tmp_path / "tokenizer", template)
    path = write_rows(tmp_path / "chats.jsonl", [{"prompt": "so", "completion": "what"}, row])
    settings = {"sources": [{"path": str(path), "chat": {}}], "tokenizer": str(tmp_path / "tokenizer")}
    settings |= {"token_dir": str(tmp_path / "tokens"), "workers": 1}
    (tmp_path / "run.yaml").write_text(json.dumps({"model": {"vocab_size": VOCAB}, "data": settings}))
    capsys.readouterr()
    assert main(["prepare", str(tmp_path / "run.yaml")]) == 2
    (told,) = capsys.readouterr().err.splitlines()[-1:]
    assert re.search(line, told) and not (tmp_path / "tokens").exists()


def test_a_source_that_keeps_no_chat_is_refused(tmp_path: Path) -> None:
    rows = [UNUSABLE["an end spelled out"][0], {"messages": []}]
    line = (
        r"chats.jsonl' keeps none of its documents: all 2 are empty, or cannot be read; mend them, or give another path"
    )
    with pytest.raises(DataError, match=line):
        opened(tmp_path, rows, max_bad_share=0.5)
    assert not (tmp_path / "tokens").exists()


def test_bad_chats_are_counted_within_the_share(tmp_path: Path) -> None:
    rows = [{"prompt": "so", "completion": f"what {n}"} for n in range(20)]
    bad = [UNUSABLE[name][0] for name in ("no messages", "an end spelled out", "no answer")]
    dataset = opened(tmp_path, [*rows, *bad, {"messages": []}], max_bad_share=0.2)
    assert sum(file.n_documents for file in dataset.files) == 20
    (record,) = tmp_path.glob("tokens/chats*/shard-00000.json")
    dropped = json.loads(record.read_text())["dropped"]
    assert dropped == {"no chat": 1, "a special token in a message": 1, "not a chat": 1, "empty": 1}
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(DataError, match=r"max_bad_share=0.1: 3 of 24 documents cannot be read"):
        opened(other, [*rows, *bad, {"messages": []}], max_bad_share=0.1)
