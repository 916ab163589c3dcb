"""Cleaning with real processes: counts, copies over sources, the same bytes whatever the workers, shares and kills."""

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from cleaning_runs import (
    HOSTILE,
    VOCAB,
    config_of,
    contents,
    edited,
    kill_at_random,
    make_texts,
    tokenizer_in,
    write_jsonl,
)
from data.cleaning.config import (
    CleaningConfig,
    DecontaminateConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    MaskConfig,
    NearConfig,
)
from data.config import DataConfig, SourceConfig
from data.errors import DataError
from data.prepare import prepare
from data.prepared import Prepared, find_prepared, verify
from data.shardwriter import dropped_from
from data.tokenfile import TokenFile
from data.tokenizer import load_fast
from launcher.cli import main

COPIES = CleaningConfig(exact=True, near=NearConfig())
FULL = CleaningConfig(
    gopher_repetition=GopherRepetitionConfig(),
    gopher_quality=GopherQualityConfig(),
    mask=MaskConfig(),
    exact=True,
    near=NearConfig(),
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> str:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer") / "bytes")


def prepared(config: DataConfig, **options) -> Prepared:
    result = prepare(config, vocab_size=VOCAB, **options)
    assert result is not None
    return result


def texts_of(result: Prepared, source: int) -> list[str]:
    """All documents of a source, decoded, in the order of its files."""
    assert result.tokenizer is not None
    fast, texts = load_fast(result.tokenizer), []
    for split in ("train", "heldout"):
        for prefix in result.sources[source].prefixes(split):
            file = TokenFile(prefix)
            texts += [fast.decode(ids[:-1].tolist()) for ids in np.split(file.tokens, file.all_starts()[1:])]
    return texts


@pytest.fixture
def corpus(tmp_path) -> tuple[list[Path], list[list[str]]]:
    """Two sources: the second has exact and near copies of the first's documents, and of its own."""
    one, fresh = make_texts(60, seed=1), make_texts(20, seed=2)
    first = [*one, one[3], "short", "mail someone@corp.org " + make_texts(1, seed=9)[0]]
    second = [*one[:10], *(edited(text) for text in one[10:20]), *fresh, edited(fresh[0]), fresh[1]]
    return [write_jsonl(tmp_path / "a.jsonl", first), write_jsonl(tmp_path / "b.jsonl", second)], [first, second]


@pytest.mark.slow
def test_the_first_copy_in_the_order_of_the_sources_is_kept(tmp_path, tokenizer, corpus):
    paths, (first, second) = corpus
    result = prepared(config_of(paths, tokenizer, tmp_path / "t", cleaning=FULL))
    kept = [Counter(texts_of(result, source)) for source in (0, 1)]
    masked = first[62].replace("someone@corp.org", "email@example.com")
    assert kept == [Counter([*first[:60], masked]), Counter(second[20:40])]
    counts = [part.manifest.cleaning for part in result.sources]
    assert counts[0]["documents"], counts[0]["kept"] == (63, 61)
    assert counts[0]["dropped"] == {"exact_duplicate": 1, "gopher_quality/gopher_short_doc": 1}
    assert counts[0]["changed"] == {"mask": 1}
    assert counts[1]["dropped"] == {"exact_duplicate": 11, "near_duplicate": 11}
    for part, count in zip(result.sources, counts, strict=True):
        assert count["documents"] == count["kept"] + sum(count["dropped"].values())
        assert count["kept"] == sum(file.n_documents for file in part.manifest.files())
        assert dropped_from(part.path)[0] == count["dropped"]
    tree = json.loads(next((tmp_path / "t").glob("cleaned-*/duplicates.json")).read_text())
    assert {(row["of"], row["kept_in"], row["reason"]): row["documents"] for row in tree["sources"]} == {
        (0, 0, "exact_duplicate"): 1,
        (1, 0, "exact_duplicate"): 10,
        (1, 0, "near_duplicate"): 10,
        (1, 1, "exact_duplicate"): 1,
        (1, 1, "near_duplicate"): 1,
    }
    assert verify(config_of(paths, tokenizer, tmp_path / "t", cleaning=FULL), result) == []
    assert find_prepared(config_of(paths, tokenizer, tmp_path / "t", cleaning=FULL), VOCAB) == result


@pytest.mark.slow
def test_neither_workers_nor_shares_change_a_byte(tmp_path, tokenizer, corpus):
    whole = config_of(corpus[0], tokenizer, tmp_path / "whole", cleaning=FULL)
    prepared(whole)
    shares = replace(whole, token_dir=str(tmp_path / "shares"), workers=1)
    done = [prepare(shares, vocab_size=VOCAB, task=(k, 2)) is not None for _ in range(3) for k in (1, 0)]
    # An array three times: texts, copies, tokens. Whoever ends a step goes on to its share of the next one.
    assert done == [False] * 3 + [True] * 3
    assert contents(tmp_path / "whole") == contents(tmp_path / "shares")


def test_without_stages_over_all_sources_an_array_needs_two_rounds(tmp_path, tokenizer, corpus):
    cleaning = CleaningConfig(mask=MaskConfig())
    config = config_of(corpus[0], tokenizer, tmp_path / "t", cleaning=cleaning, workers=1)
    done = [prepare(config, vocab_size=VOCAB, task=(k, 2)) is not None for _ in range(2) for k in (0, 1)]
    assert done[-1] and not done[0]
    assert len(list((tmp_path / "t").glob("cleaned-*"))) == 2  # each source by itself


@pytest.mark.slow
def test_killed_at_random_moments_the_bytes_are_the_same(tmp_path, tokenizer, corpus):
    kill_at_random(tmp_path, config_of(corpus[0], tokenizer, tmp_path / "t", cleaning=FULL), 2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_fifty_times_the_bytes_are_the_same(tmp_path, tokenizer, corpus):
    config = config_of(corpus[0], None, tmp_path / "t", cleaning=FULL, shard_bytes=4000)
    kill_at_random(tmp_path, config, 50, seed=2)


@pytest.mark.slow
def test_planted_damage_to_cleaned_files_is_told(tmp_path, tokenizer, corpus):
    config = config_of(corpus[0], tokenizer, tmp_path / "t", cleaning=COPIES, workers=1)
    result = prepared(config)
    (folder,) = (tmp_path / "t").glob("cleaned-*")
    for name in ("manifest.json", "shard-00000.json"):
        (result.sources[0].path / name).unlink()
    (folder / "text/00000.jsonl.zst").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"text/00000\.jsonl\.zst is damaged .*; remove .*cleaned-.* and prepare again"):
        prepare(config, vocab_size=VOCAB)
    (folder / "shard-00000.json").write_text('{"torn')  # then it is cleaned again
    assert prepared(config) == result


def test_what_files_hold_without_cleaning_is_what_it_was(tmp_path, monkeypatch, tokenizer):
    """The hash is that of the files which prepare wrote before it could clean."""
    monkeypatch.chdir(tmp_path)
    tokenizer_in(Path("tokenizer"))
    draw, words = random.Random(0), ["round", "table", "seat", "équipe"]
    texts = [f"{i}: " + " ".join(draw.choices(words, k=draw.randint(1, 40))) for i in range(120)]
    write_jsonl(Path("corpus.jsonl"), [*texts, "", "nonsense"])
    with Path("corpus.jsonl").open("a") as file:
        file.write("not json\n")
    config = DataConfig(
        sources=(SourceConfig(path="corpus.jsonl", max_bad_share=0.5),),
        tokenizer="tokenizer",
        token_dir="t",
        shard_bytes=3000,
        workers=1,
        heldout_fraction=0.2,
    )
    (part,) = prepared(config).sources
    digest = hashlib.sha256()
    for path in sorted(part.path.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    assert digest.hexdigest() == "fd56e4211211ea72e7ece32f9304a36dfff2feca8aaf5419a3829bb6816cecca"


@pytest.mark.slow
def test_another_setting_makes_other_files_and_a_changed_evaluation_set_is_refused(tmp_path, tokenizer, corpus):
    exam = write_jsonl(tmp_path / "exam.jsonl", make_texts(1, seed=77))
    cleaning = CleaningConfig(decontaminate=DecontaminateConfig(files=(str(exam),)), exact=True)
    config = config_of(corpus[0][:1], tokenizer, tmp_path / "t", cleaning=cleaning, workers=1)
    paths = [
        prepared(each).sources[0].path
        for each in (
            config,
            replace(config, cleaning=replace(cleaning, max_chars=10**5)),
            replace(config, cleaning=None),
        )
    ]
    assert len(set(paths)) == 3
    before = exam.read_text()
    write_jsonl(exam, make_texts(1, seed=78))
    with pytest.raises(
        DataError, match=r"data\.cleaning\.decontaminate\.files='.*' is not what .* was cleaned with; rem"
    ):
        prepare(config, vocab_size=VOCAB)
    exam.write_text(before)
    prepared(config)
    exam.unlink()
    assert find_prepared(config, VOCAB) is not None  # a file that has gone is not missed


def remedied(call) -> str:
    """The refusal of the call, after all that it says to remove has been removed."""
    with pytest.raises(DataError) as refused:
        call()
    (line,) = refused.value.problems
    for folder in line.rpartition("; remove ")[2].removesuffix(" and prepare again").split(", "):
        shutil.rmtree(folder)
    return line


@pytest.mark.slow
@pytest.mark.parametrize("is_finished", [True, False])
def test_tokens_are_made_again_where_an_evaluation_set_has_changed(tmp_path, tokenizer, is_finished):
    held, texts = make_texts(2, seed=77), make_texts(6)
    exam = write_jsonl(tmp_path / "exam.jsonl", held[:1])
    paths = [write_jsonl(tmp_path / "a.jsonl", [*texts, *held]), write_jsonl(tmp_path / "b.jsonl", [*held, *texts])]
    cleaning = CleaningConfig(decontaminate=DecontaminateConfig(files=(str(exam),)))
    config = config_of(paths, tokenizer, tmp_path / "t", cleaning=cleaning, workers=1, heldout_fraction=0.0)
    assert texts_of(prepared(config), 0) == [*texts, held[1]]
    if not is_finished:
        for manifest in (tmp_path / "t").glob("*/manifest.json"):
            manifest.unlink()
    write_jsonl(exam, held)
    for folder in (tmp_path / "t").glob("cleaned-*"):  # tokens alone know what they were cleaned with
        shutil.rmtree(folder)
    if is_finished:
        with pytest.raises(DataError, match=r"files='.*' is not what .*/[ab]-jsonl-\w+ was cleaned with; remove"):
            find_prepared(config, VOCAB)
    with pytest.raises(
        DataError, match=r"files='.*' is not what .*/[ab]-jsonl-\w+ was cleaned with; remove"
    ) as refused:
        prepare(config, vocab_size=VOCAB)
    assert len(refused.value.problems) == 2  # each source is cleaned by itself
    for line in refused.value.problems:
        shutil.rmtree(line.rpartition("; remove ")[2].removesuffix(" and prepare again"))
    assert [texts_of(prepared(config), source) for source in (0, 1)] == [texts, texts]
    assert find_prepared(config, VOCAB) is not None


@pytest.mark.parametrize("is_old", [False, True])
def test_one_changed_source_invalidates_all_that_were_cleaned_with_it(tmp_path, tokenizer, is_old):
    texts = make_texts(30)
    paths = [write_jsonl(tmp_path / "a.jsonl", texts[:20]), write_jsonl(tmp_path / "b.jsonl", texts[10:])]
    config = config_of(
        paths, tokenizer, tmp_path / "t", cleaning=CleaningConfig(exact=True), workers=1, heldout_fraction=0.0
    )
    assert texts_of(prepared(config), 1) == texts[20:]
    if is_old:
        for note in (tmp_path / "t").glob("*/cleaned_from.json"):
            note.unlink()
    write_jsonl(paths[0], texts[:10])
    line = remedied(lambda: prepare(config, vocab_size=VOCAB))
    assert line.startswith(f"data.sources[0].path='{paths[0]}' is not what {tmp_path}/t/cleaned-a-jsonl-")
    assert list((tmp_path / "t").glob("[abc]*")) == []
    result = prepared(config)
    assert [texts_of(result, source) for source in (0, 1)] == [texts[:10], texts[10:]]
    assert find_prepared(config, VOCAB) == result


def test_tokens_that_were_not_cleaned_together_are_refused_though_their_texts_are_gone(tmp_path, tokenizer):
    texts = make_texts(30)
    paths = [write_jsonl(tmp_path / "a.jsonl", texts[:20]), write_jsonl(tmp_path / "b.jsonl", texts[10:])]
    config = config_of(paths, tokenizer, tmp_path / "t", cleaning=CleaningConfig(exact=True), workers=1)
    result = prepared(config)
    paths[0].unlink()
    assert find_prepared(config, VOCAB) == result
    note = result.sources[1].path / "cleaned_from.json"
    note.write_text(note.read_text().replace(json.loads(note.read_text())[f"data.sources[0].path='{paths[0]}'"], "0"))
    line = remedied(lambda: find_prepared(config, VOCAB))
    assert str(result.sources[0].path) in line and str(result.sources[1].path) in line


def command(tmp_path: Path, config: DataConfig, *overrides: str) -> list[str]:
    from dataclasses import asdict

    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"name": "x", "model": {"vocab_size": VOCAB}, "data": asdict(config)}))
    return ["prepare", str(path), *overrides]


@pytest.mark.slow
def test_a_corpus_of_which_nothing_is_left_is_one_line(tmp_path, tokenizer, capsys):
    paths = [write_jsonl(tmp_path / "a.jsonl", make_texts(5)), write_jsonl(tmp_path / "b.jsonl", ["short", "texts"])]
    cleaning = replace(COPIES, gopher_quality=GopherQualityConfig())
    config = config_of(paths, tokenizer, tmp_path / "t", cleaning=cleaning, workers=1)
    assert main(command(tmp_path, config)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("preparing:")]
    assert line.startswith(
        f"data.sources[1].path='{paths[1]}' keeps none of its 2 documents after data.cleaning (2 gopher"
    )
    assert "; loosen these stages, or leave the source out; " in line
    assert not list((tmp_path / "t").glob("tokenizer-*")) + list((tmp_path / "t").glob("a-jsonl-*"))


@pytest.mark.parametrize(
    ("cleaning", "line"),
    [
        (CleaningConfig(), "data.cleaning must turn a stage on"),
        (replace(COPIES, words="zz"), "data.cleaning.words='zz' is no language"),
        (CleaningConfig(words="zz", exact=True), "data.cleaning.words='zz' is for stages that split documents into"),
        (
            CleaningConfig(decontaminate=DecontaminateConfig(files=("BAD",))),
            "data.cleaning.decontaminate.files='BAD': line 1",
        ),
    ],
)
def test_refusals_create_nothing(tmp_path, tokenizer, capsys, monkeypatch, cleaning, line):
    monkeypatch.chdir(tmp_path)
    Path("BAD").write_text("nonsense\n")
    config = config_of([write_jsonl(tmp_path / "a.jsonl", make_texts(5))], tokenizer, tmp_path / "t", cleaning=cleaning)
    assert main(command(tmp_path, config)) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(line), said
    assert not (tmp_path / "t").exists()


@pytest.mark.slow
def test_bad_hostile_and_endless_documents(tmp_path, tokenizer):
    """Bad records are counted as without cleaning; one of 100 MB is dropped in bounded time."""
    good = make_texts(20)
    lines = [json.dumps({"text": text}).encode() for text in [*good, HOSTILE * 20, "", "lone \ud800 " + good[0]]]
    lines[5:5] = [b'{"text": "caf\xe9"}', b"nonsense", b'{"body": 1}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [good[1], os.urandom(50_000_000).hex()]}), tmp_path / "b.parquet"
    )
    config = config_of([tmp_path / "a.jsonl", tmp_path / "b.parquet"], tokenizer, tmp_path / "t", cleaning=FULL)
    config = replace(config, sources=tuple(replace(source, max_bad_share=0.3) for source in config.sources))
    with pytest.raises(
        DataError, match=r"data\.sources\[1\].* keeps none of its 2 documents .*1 exact_dup.*1 too_long"
    ):
        prepare(config, vocab_size=VOCAB)
    (folder,) = (tmp_path / "t").glob("cleaned-*")
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("shard-*.json"))]
    dropped: Counter[str] = Counter()
    for record in records:
        dropped.update(record["dropped"])
    assert sum(record["n_documents"] for record in records) == 28
    assert dropped["not UTF-8"] == dropped["not JSON"] == dropped["no text_key"] == dropped["empty"] == 1
    assert dropped["too_long"] == 1 and dropped.total() >= 5
    for record in records:
        assert len(json.dumps(record)) < 20_000  # samples are bounded
    with pytest.raises(DataError, match=r"max_bad_share=0\.0|is not UTF-8|is not JSON"):
        prepare(replace(config, sources=(SourceConfig(path=str(tmp_path / "a.jsonl")),)), vocab_size=VOCAB)


def test_planted_copies_are_found_as_theory_has_it(tmp_path):
    """The benchmark's line for other bands than the default's, so that the formula is tried at two places."""
    import subprocess
    import sys

    root = Path(__file__).parents[2]
    options = ["--pairs", "40", "--buckets", "6", "--hashes", "3", "--n_grams", "3"]
    done = subprocess.run(
        [sys.executable, "benchmarks/near_duplicates.py", *options],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert [row["edits"] for row in found["rows"] if not row["inside"]] == []
    assert found["precision"] == 1.0
    recalls = [row["recall"] for row in found["rows"]]
    assert recalls[0] == 1.0 and recalls[-1] < 0.5 and recalls == sorted(recalls, reverse=True)
