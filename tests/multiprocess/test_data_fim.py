"""Fill in the middle in real runs: every layout is given the same tokens, resumed or not, and `data show` tells."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from chats import save_chat_tokenizer
from data.prepare import prepare
from data.tokenfile import TokenFile
from data.tokenwriter import TokenFileWriter
from data_runs import one_source_run, run_recorded, tokens_of_steps
from health_runs import Plan
from launcher.cli import main
from launcher.config.tree import RunConfig
from layout_runs import DENSE_MODEL, run_config

LAYOUTS = {"dp": (2, {}, 2), "cp": (2, {"cp": 2}, 4)}  # ranks, degrees, micro-batch
PRE, MID, SUF = 3, 4, 5
MODEL = dataclasses.replace(DENSE_MODEL, vocab_size=512)


def a_config(folder: Path, name: str, degrees: dict[str, int], *, steps: int, size: int) -> RunConfig:
    options = {"micro_batch_size": size, "steps": steps, "global_batch_size": 8}
    config = run_config(str(folder / "a"), model=MODEL, **options)
    places = {"tokenizer": str(folder / "tokenizer"), "token_dir": str(folder / "tokens")}
    return one_source_run(config, folder, name, degrees, **places, fim_rate=0.7, fim_tokens=("<pre>", "<suf>", "<mid>"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Counter[int]]]:
    folder, draw = tmp_path_factory.mktemp("fim"), np.random.default_rng(0)
    save_chat_tokenizer(folder / "tokenizer")
    writer = TokenFileWriter(folder / "a", np.dtype(np.uint16))
    for n in draw.integers(2, 40, 60):
        writer.add([*draw.integers(10, 250, int(n)).tolist(), 0])
    writer.finish()
    config = a_config(folder, "plain", {}, steps=4, size=1)
    prepare(config.data, vocab_size=MODEL.vocab_size)
    (folder / "given").mkdir()
    assert run_recorded(folder / "given", Plan(), config, 1) == [0]
    return folder, tokens_of_steps(folder / "given")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "cp"])
def test_every_layout_is_given_the_same_tokens(plain, tmp_path: Path, layout: str) -> None:
    """Two steps, then two more after a resumption, with other micro-batches than the plain run's."""
    folder, given = plain
    n_ranks, degrees, size = LAYOUTS[layout]
    for steps in (2, 4):
        config = a_config(folder, f"on {layout}", degrees, steps=steps, size=size)
        assert run_recorded(tmp_path, Plan(), config, n_ranks) == [0] * n_ranks
    assert tokens_of_steps(tmp_path) == given
    assert sum(counts[MID] for counts in given.values()) > 20


def test_data_show_tells_how_each_part_was_rearranged(plain, capsys: pytest.CaptureFixture[str]) -> None:
    """From the ranges that it names, the step's tokens are put together again."""
    folder, given = plain
    file = TokenFile(folder / "a")
    for step in range(1, 5):
        assert main(["data", "show", str(folder / "plain"), "--step", str(step), "--json"]) == 0
        found: Counter[int] = Counter()
        for span in json.loads(capsys.readouterr().out)["spans"]:
            first, stop = span["tokens"]
            tokens = file.tokens[first:stop].tolist()
            if fim := span.get("fim"):
                prefix, middle, suffix = (
                    file.tokens[slice(*fim[name])].tolist() for name in ("prefix", "middle", "suffix")
                )
                end = file.tokens[fim["given_up"][1] : file.document_range(file.document_of(first))[1]].tolist()
                whole = [PRE, *prefix, SUF, *suffix, MID, *middle, *end]
                if fim["order"] == "spm":
                    whole = [PRE, SUF, *suffix, MID, *prefix, *middle, *end]
                tokens = whole[: stop - first]
            found.update(token for token in tokens if token)
        assert found == given[step]
    assert main(["data", "show", str(folder / "plain"), "--step", "1"]) == 0
    assert "psm, middle" in capsys.readouterr().out
    assert main(["data", "diff", str(folder / "plain"), str(folder / "plain")]) == 0
