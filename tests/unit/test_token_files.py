"""A run goes on with the token files that it began with, and with no others."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.config import SourceConfig
from data.prepare import prepare
from data.tokenwriter import TokenFileWriter
from data_reference import write_token_file
from launcher.commands.data_run import open_run
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.run_dir import check_run_dir, claim
from launcher.training.start import check_tokens
from layout_runs import DENSE_MODEL, run_config
from prepare_runs import VOCAB, make_documents, save_tiny_tokenizer, write_jsonl

DOCUMENTS = [[1 + n % 60] * 9 for n in range(40)]


def config_in(folder: Path, **data: object) -> RunConfig:
    config = run_config(str(folder / "fx"), model=dataclasses.replace(DENSE_MODEL, vocab_size=VOCAB))
    return dataclasses.replace(
        config, name="run", run_dir=str(folder / "run"), data=dataclasses.replace(config.data, **data)
    )


def refusal(config: RunConfig) -> str:
    """The one line that a start of the run says, and that `roundtable data` says of its past steps."""
    with pytest.raises(UserError) as started:
        check_tokens(config)
    with pytest.raises(UserError) as shown:
        open_run(str(config.run_path))
    assert started.value.problems == shown.value.problems
    (line,) = started.value.problems
    return line


def test_a_token_file_that_was_rewritten_is_refused(tmp_path: Path) -> None:
    write_token_file(tmp_path / "fx", DOCUMENTS)
    config = config_in(tmp_path)
    claim(config).close()
    check_tokens(config)
    write_token_file(tmp_path / "fx", [*DOCUMENTS, *DOCUMENTS])
    assert refusal(config) == (
        f"data.sources[0].path='{tmp_path}/fx': {tmp_path}/fx.bin is not the one that the run began with (its .bin had "
        f"720 bytes and has 1440; see {tmp_path}/run/token_files.json); put the old files back, or the text that they "
        "were prepared from, or train on the new ones in another run (another name, or `roundtable branch`)"
    )
    write_token_file(tmp_path / "fx", [*DOCUMENTS[:-1], [61] * 9])
    assert "(another .bin; see" in refusal(config)
    write_token_file(tmp_path / "fx", [*DOCUMENTS[:-2], DOCUMENTS[-2] + DOCUMENTS[-1]])
    assert "(another .idx; see" in refusal(config)
    write_token_file(tmp_path / "fx", DOCUMENTS)
    check_tokens(config)
    open_run(str(config.run_path))


def test_another_mask_alone_is_refused(tmp_path: Path) -> None:
    def write(masked: int | None) -> None:
        writer = TokenFileWriter(tmp_path / "fx", np.dtype(np.uint16), has_mask=masked is not None)
        for document in DOCUMENTS:
            is_target = None if masked is None else np.arange(len(document)) >= masked
            writer.add(np.array(document), is_target)
        writer.finish()

    write(2)
    config = config_in(tmp_path)
    claim(config).close()
    check_tokens(config)
    write(3)
    assert "(another .mask; see" in refusal(config)
    write(2)
    check_tokens(config)
    (tmp_path / "fx.mask").unlink()
    assert "(another .mask; see" in refusal(config)


def test_a_held_out_file_that_was_rewritten_is_refused(tmp_path: Path) -> None:
    for name in ("fx", "held"):
        write_token_file(tmp_path / name, DOCUMENTS)
    config = config_in(tmp_path, heldout_path=str(tmp_path / "held"))
    claim(config).close()
    write_token_file(tmp_path / "held", DOCUMENTS[:-1])
    assert refusal(config).startswith(f"data.heldout_path='{tmp_path}/held': {tmp_path}/held.bin is not the one that")


def test_a_corpus_that_was_prepared_anew_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tiny_tokenizer(tmp_path / "tiny")
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(30))
    sources = (SourceConfig(path=str(path)),)
    config = config_in(tmp_path, sources=sources, tokenizer=tokenizer, token_dir=str(tmp_path / "tk"), workers=1)
    prepare(config.data, vocab_size=VOCAB)
    claim(config).close()
    write_jsonl(tmp_path / "a.jsonl", make_documents(33))
    shutil.rmtree(tmp_path / "tk")
    prepare(config.data, vocab_size=VOCAB)
    assert refusal(config).startswith(f"data.sources[0].path='{path}': {tmp_path}/tk/a-jsonl-")
    write_jsonl(tmp_path / "a.jsonl", make_documents(30))
    elsewhere = dataclasses.replace(config, data=dataclasses.replace(config.data, token_dir=str(tmp_path / "other")))
    prepare(elsewhere.data, vocab_size=VOCAB)
    check_tokens(elsewhere)


def test_a_run_from_before_there_was_a_record_goes_on_and_writes_it(tmp_path: Path) -> None:
    write_token_file(tmp_path / "fx", DOCUMENTS)
    config = config_in(tmp_path)
    claim(config).close()
    record = tmp_path / "run/token_files.json"
    before = record.read_bytes()
    record.unlink()
    check_tokens(config)
    open_run(str(config.run_path))
    claim(config).close()
    assert record.read_bytes() == before
    record.write_text("{}")
    check_tokens(config)
    for content in ("[1]", '{"a": 3}', '{"a": {"b": 3}}', "{"):
        record.write_text(content)
        with pytest.raises(UserError, match=r"token_files\.json must hold what the token files were"):
            open_run(str(config.run_path))
        with pytest.raises(UserError, match=r"token_files\.json must hold what the token files were"):
            check_run_dir(config)


def test_a_change_anywhere_in_a_sampled_file_of_another_size_is_seen(tmp_path: Path) -> None:
    """The sizes and both ends count; what lies between is looked at in samples."""
    from data.tokenfile import sampled_hash

    random = np.random.default_rng(0)
    content = bytearray(random.bytes(1 << 20))
    path = tmp_path / "a"
    path.write_bytes(content)
    hashes = {sampled_hash(path)}
    for place in (0, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        hashes.add(sampled_hash(path))
    path.write_bytes(content + b"\0")
    hashes.add(sampled_hash(path))
    for size in (0, 1, 5):
        path.write_bytes(bytes(size))
        hashes.add(sampled_hash(path))
    assert len(hashes) == 8
