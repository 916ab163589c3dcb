"""`roundtable inspect`: what it prints and writes, what it refuses, and planted faults that it tells."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

import launcher.inspection.attention as inspected_attention
import launcher.inspection.lens as inspected_lens
import launcher.inspection.page as inspected_page
import launcher.inspection.write as inspected_write
from inspect_runs import HOSTILE, inspectable
from launcher.cli import main
from launcher.commands.trained import open_trained
from launcher.errors import UserError
from launcher.inspection.asked import Wishes, chosen_maps
from launcher.inspection.experts import Tally, by_chance, shares_of, specialisation, strongest_pair, together
from launcher.inspection.pictures import draw_attention, draw_experts
from launcher.training.evaluation import open_heldout
from modeling.context import Context
from modeling.decoder import Decoder

TEXT = "def f(x):\n    return x\n"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoder]:
    """A mixture of experts with two sources."""
    return inspectable(tmp_path_factory.mktemp("inspected"), sources=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inspectable(tmp_path_factory.mktemp("dense"), "llama")[0]


def asked(capsys: Captured, *words: object) -> tuple[int, str, list[str]]:
    """The exit code, standard output, and the lines of standard error."""
    capsys.readouterr()
    code = main(["inspect", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out, told.err.splitlines()


def report_of(capsys: Captured, *words: object) -> dict[str, Any]:
    code, out, _ = asked(capsys, *words, "--json")
    assert code == 0
    return json.loads(out)


def test_the_report_is_what_the_model_computes(run: tuple[Path, Decoder], capsys: Captured) -> None:
    """To 6 digits, as it is printed: lens, routing, and each head's weights by the textbook's formula."""
    path, model = run
    report = report_of(capsys, path, "--text", TEXT, "--layers", "1", "--heads", "0,2-3", "--top-k", "3")
    (text,) = report["texts"]
    assert "".join(text["token_texts"]) == TEXT
    ids_BS = torch.tensor([text["tokens"]])
    context = Context(torch.arange(ids_BS.shape[1])[None], torch.zeros_like(ids_BS))
    with torch.no_grad():
        output = model(ids_BS, context)
    assert output.logits_BSV is not None
    best = output.logits_BSV[0].softmax(-1).topk(3)
    assert text["lens"][-1]["top"] == best.indices.tolist()
    np.testing.assert_allclose(text["lens"][-1]["top_probabilities"], best.values.numpy(), rtol=1e-5)
    logits_SV, next_S = output.logits_BSV[0, :-1], ids_BS[0, 1:]
    ranks_S = (logits_SV > logits_SV.gather(1, next_S[:, None])).sum(-1) + 1
    assert text["lens"][-1]["next_rank"] == ranks_S.tolist()
    assert text["lens"][-1]["median_rank"] == np.median(ranks_S)
    assert text["lens"][-1]["loss"] == pytest.approx(cross_entropy(logits_SV, next_S).item(), rel=1e-5)
    for row in text["lens"]:
        assert row["first_is_right"] == row["next_rank"].count(1) / len(next_S)
    assert [row["layer"] for row in text["lens"]] == [None, 0, 1]
    assert {row["layer"]: row["experts"] for row in text["routing"]} == {
        layer: stats.choice_TK.tolist() for layer, stats in output.stats.items()
    }
    (layer,) = text["attention"]
    assert (layer["layer"], [head["head"] for head in layer["heads"]]) == (1, [0, 2, 3])
    assert [len(row) for row in layer["heads"][0]["weights"]] == list(range(1, ids_BS.shape[1] + 1))
    sums = [sum(row) for head in layer["heads"] for row in head["weights"]]
    np.testing.assert_allclose(sums, 1, atol=1e-4)
    assert report["checks"]["attention"]["right"] and report["checks"]["lens"]["last_layer_is_the_output"]
    assert report["written"] == [] and report["notes"] == []


def test_the_summary_is_short_and_says_what_was_checked(run: tuple[Path, Decoder], capsys: Captured) -> None:
    code, out, err = asked(capsys, run[0], "--text", TEXT)
    assert code == 0 and err == []
    lines = out.splitlines()
    assert lines[0] == "run, step 5: qwen3_moe, 2 layers of 4 heads, in fp32 on a CPU"
    assert lines[1].startswith("attention: weights times values make each layer's own output to ")
    assert lines[2] == "lens: the last layer's logits are the model's, bit for bit"
    assert "held-out text of the run's sources, 8 sequences of each at most: words" in out
    assert "text 1: 23 tokens; where heads look" in out and "likeliest tokens after the text: " in out
    assert len(lines) < 30


def test_sources_are_told_apart_by_their_heldout_text(run: tuple[Path, Decoder], capsys: Captured) -> None:
    path, model = run
    experts = report_of(capsys, path, "--text", TEXT, "--sequences", "3")["experts"]
    assert experts["of_heldout"] and experts["sources"] == ["words", "digits"]
    heldout = open_heldout(open_trained(path))
    for number, (first, n) in enumerate(heldout.ranges(3).values()):
        counts: dict[int, np.ndarray] = {}
        for start in range(first, first + n, 2):  # micro-batches, as the command takes them
            batch = heldout.read(np.arange(start, min(start + 2, first + n)))
            rows = [torch.from_numpy(each) for each in (batch.tokens_BS, batch.positions_BS, batch.documents_BS)]
            with torch.no_grad():
                stats = model(rows[0], Context(*rows[1:], has_padding=batch.has_padding)).stats
            for layer, each in stats.items():
                counts[layer] = counts.get(layer, 0) + each.counts_E.numpy()
        for layer in experts["layers"]:
            assert layer["source_counts"][number] == counts[layer["layer"]].tolist()
    for layer in experts["layers"]:
        assert np.array(layer["source_counts"]).sum(0).tolist() == layer["counts"]
        assert np.diagonal(layer["pairs"]).tolist() == layer["counts"]
        assert layer["specialisation_bits"] > layer["by_chance_bits"] > 0  # letters and digits go to other experts


def test_without_sources_the_texts_are_compared(tmp_path: Path, capsys: Captured) -> None:
    path, _ = inspectable(tmp_path)
    experts = report_of(capsys, path, "--text", "abc", "--text", "0123")["experts"]
    assert not experts["of_heldout"] and experts["tokens"] == {"text 1": 3, "text 2": 4}


def test_sources_that_have_gone_are_told_and_the_texts_stand_for_them(tmp_path: Path, capsys: Captured) -> None:
    path, _ = inspectable(tmp_path, sources=True)
    (tmp_path / "tokens").rename(tmp_path / "moved")
    code, out, (line,) = asked(capsys, path, "--text", TEXT)
    assert code == 0 and "cannot be read, so the texts stand for sources: data.token_dir=" in line
    assert "experts, by the text: text 1 23 tokens" in out
    code, out, (line,) = asked(capsys, path, "--text", TEXT, "--sequences", "2")
    assert code == 2 and line.startswith("--sequences=2 needs several sources' held-out text: ")


def test_tallies_of_pairs() -> None:
    tally = Tally()
    tally.add({0: torch.tensor([[0, 1], [1, 0], [2, 0]])}, 4)
    tally.add({0: torch.tensor([[2, 3]])}, 4)
    assert tally.n_tokens == 4 and tally.counts[0].tolist() == [3, 2, 2, 1]
    assert tally.pairs[0].tolist() == [[3, 2, 1, 0], [2, 2, 0, 0], [1, 0, 2, 1], [0, 0, 1, 1]]
    both = together([tally, tally])
    assert both.n_tokens == 8 and both.pairs[0].tolist() == (2 * tally.pairs[0]).tolist()
    assert tally.counts[0].sum() == 8, "the sum left its parts as they were"
    assert strongest_pair(np.diag([3, 2])) is None
    pairs_EE = np.array([[20, 18, 2], [18, 20, 2], [2, 2, 4]])
    one, other, tokens, chance = strongest_pair(pairs_EE) or (0, 0, 0, 0.0)
    assert (one, other, tokens) == (0, 1, 18) and chance == pytest.approx(22 * 400 / 560)


@pytest.mark.parametrize("n_experts", [2, 3, 5])
def test_the_strongest_pair_is_one_that_tokens_chose(n_experts: int) -> None:
    """Also where no pair is above chance, by rounding even below it, and where an expert is idle."""
    assert strongest_pair(np.full((2, 2), 100)) == (0, 1, 100, 100.0)
    pairs_EE = np.full((n_experts, n_experts), 7) + np.diag([7 * (n_experts - 2)] * n_experts)
    one, other, tokens, chance = strongest_pair(np.pad(pairs_EE, (1, 0))) or (0, 0, 0, 0.0)
    assert 1 <= one < other and tokens == 7 and chance == pytest.approx(7)


def test_specialisation_is_the_information_about_the_source() -> None:
    assert specialisation(np.array([[0.5, 0.5], [0.5, 0.5]])) == 0
    assert specialisation(np.array([[1.0, 0.0], [0.0, 1.0]])) == 1
    assert specialisation(np.eye(4)) == 2
    draw = np.random.default_rng(0)
    found = [draw.multinomial(3000, np.full(8, 1 / 8), size=2) for _ in range(200)]
    mean = np.mean([specialisation(np.stack([shares_of(row) for row in counts])) for counts in found])
    assert by_chance(found[0]) == pytest.approx(mean, rel=0.1), "what chance alone makes"


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "gemma2", "bloom", "gpt2"])
def test_other_families_pass_too(family: Any, tmp_path: Path, capsys: Captured) -> None:
    path, _ = inspectable(tmp_path, family)
    code, out, err = asked(capsys, path, "--text", TEXT, "--out", tmp_path / "page.html")
    assert code == 0 and err == [] and "NOT" not in out
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_in_bf16(run: tuple[Path, Decoder], capsys: Captured) -> None:
    report = report_of(capsys, run[0], "--text", TEXT, "--dtype", "bf16")
    assert report["dtype"] == "bf16" and report["checks"]["attention"]["output_tolerance"] == 4 * 2**-7


def test_a_folder_gets_the_page_and_pictures(run: tuple[Path, Decoder], tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "new"
    texts = ["--text", TEXT[:9], "--text", "$\\frac$ \x1b é"]
    code, printed, _ = asked(capsys, run[0], *texts, "--layers", "1", "--heads", "0,3", "--out", out)
    assert code == 0 and printed.splitlines()[-1] == str(out / "inspect.html")
    names = {each.name for each in out.iterdir()}
    attention = {"attention-text1-layer01.png", "attention-text2-layer01.png"}
    assert names == {"inspect.html", "lens-text1.png", "lens-text2.png", *attention, *experts_pictures(run[1])}
    for name in names - {"inspect.html"}:
        with Image.open(out / name) as picture:
            colors = picture.convert("RGB").getcolors(1 << 24)
            assert picture.width > 400 and colors is not None and len(colors) > 20, name
    assert [each.name for each in tmp_path.iterdir()] == ["new"]


def experts_pictures(model: Decoder) -> set[str]:
    layers = [layer.layer for layer in model.own_layers if hasattr(layer.feed_forward, "router")]
    return {f"experts-layer{layer:02d}.png" for layer in layers}


@pytest.mark.parametrize("n_experts", [1, 2, 4, 256])
def test_experts_are_numbered_by_whole_numbers(n_experts: int) -> None:
    layer = {"layer": 0, "pairs": np.ones((n_experts, n_experts)), "source_counts": np.ones((2, n_experts))}
    left, right, *_ = draw_experts({"sources": ["a", "b"]}, layer).axes
    for axis, limits in ((left.xaxis, left.get_xlim()), (left.yaxis, left.get_ylim()), (right.xaxis, right.get_xlim())):
        shown = [tick for tick in axis.get_majorticklocs() if min(limits) <= tick <= max(limits)]
        assert len(shown) >= min(2, n_experts) and all(tick == int(tick) for tick in shown), shown


def test_a_page_leaves_out_pairs_of_experts_that_would_make_it_large() -> None:
    """256 experts in each of 58 layers: pairs of 15 layers, evenly spaced, the others with all but these."""
    layers = [{"layer": layer, "pairs": [[0]], "counts": [0]} for layer in range(58)]
    found = inspected_page.drawn_experts({"n_experts": 256, "layers": layers})["layers"]
    with_pairs = [each["layer"] for each in found if "pairs" in each]
    assert len(found) == 58 and len(with_pairs) == 15 and with_pairs[::14] == [0, 57]
    assert all("counts" in each for each in found)
    few = inspected_page.drawn_experts({"n_experts": 64, "layers": layers})["layers"]
    assert all("pairs" in each for each in few)


def test_a_page_is_written_over(run: tuple[Path, Decoder], tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "a.html"
    page.write_text("before")
    assert asked(capsys, run[0], "--text", TEXT, "--show", "lens", "--out", page)[0] == 0
    assert page.read_text().startswith("<!doctype html>") and 'id="attention"' not in page.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["a.html"]


def test_hostile_text_is_text_everywhere(run: tuple[Path, Decoder], tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps({"text": HOSTILE}) + "\n")
    code, out, err = asked(capsys, run[0], "--text", HOSTILE, "--text-file", file, "--out", tmp_path / "a.html")
    assert code == 0 and err == []
    unsafe = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e]"
    page = (tmp_path / "a.html").read_text()
    assert not re.search(unsafe, out) and not re.search(unsafe, page)
    assert page.count("<script") == 2 and "<img" not in page and "window.stolen" not in page.split("<script")[0]
    report = report_of(capsys, run[0], "--text", HOSTILE)
    assert "".join(report["texts"][0]["token_texts"][:9]) == "</script>"
    assert bytes_of(report["texts"][0]["tokens"], run[0]) == HOSTILE


def bytes_of(ids: list[int], run: Path) -> str:
    from data.tokenizer import load_fast

    return load_fast(run / "checkpoints/step-00000005/tokenizer").decode(ids, skip_special_tokens=False)


def test_a_special_tokens_name_in_a_text_is_text(run: tuple[Path, Decoder], capsys: Captured) -> None:
    (text,) = report_of(capsys, run[0], "--text", "<|endoftext|>")["texts"]
    assert len(text["tokens"]) == 13 and 0 not in text["tokens"]


def test_long_texts_are_cut_and_it_is_told(run: tuple[Path, Decoder], tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "many.jsonl").write_text('{"body": "abc"}\n' * 11)
    (tmp_path / "long.txt").write_text("a" * 200_000)
    words = ["--text", "a" * 40, "--max-tokens", "10", "--show", "lens", "--text-key", "body"]
    files = ["--text-file", tmp_path / "long.txt", "--text-file", tmp_path / "many.jsonl"]
    code, out, err = asked(capsys, run[0], *words, *files)
    assert code == 0 and err == [
        f"--text-file={tmp_path / 'many.jsonl'}: its first 8 documents are taken; it has more",
        "of 10 texts the first 8 are shown",
        "text 1: the first 10 of 40 tokens are shown (--max-tokens)",
        "long.txt: the first 10 of more than 100000 tokens are shown (--max-tokens)",
    ]
    assert "many.jsonl: 6: 3 tokens" in out and "many.jsonl: 7" not in out


def test_learned_positions_end_the_text(tmp_path: Path, capsys: Captured) -> None:
    path, _ = inspectable(tmp_path, "gpt2", max_positions=9)
    code, _, (line,) = asked(capsys, path, "--text", TEXT)
    assert code == 0 and line == "text 1: the first 9 of 23 tokens are shown (--max-tokens)"


def test_a_text_of_one_token(run: tuple[Path, Decoder], tmp_path: Path, capsys: Captured) -> None:
    code, out, err = asked(
        capsys, run[0], "--text", "a", "--show", "lens,attention", "--layers", "0", "--out", tmp_path / "new"
    )
    assert code == 0 and err == [] and "text 1: 1 token;" in out
    assert not (tmp_path / "new/lens-text1.png").exists()


def test_a_text_that_is_a_files_name_is_pointed_at(run: tuple[Path, Decoder], tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "a.txt").write_text("abc")
    code, _, (line,) = asked(capsys, run[0], "--text", tmp_path / "a.txt")
    assert code == 0 and line.endswith("is taken as text; the file of that name is read with --text-file")


REFUSED = {
    "no text": ([], "no text is given to look at; add --text"),
    "empty text": (["--text", ""], '--text="" must not be empty'),
    "many texts": (["--text", "a"] * 9, "--text is given 9 times, and may be 8 times at most"),
    "no file": (["--text-file", "gone.txt"], "--text-file='gone.txt' does not exist"),
    "empty file": (["--text-file", "empty.txt"], "--text-file=empty.txt holds no text"),
    "no text in it": (["--text-file", "binary.bin"], "is not text: it holds NUL bytes"),
    "no file's name": (["--text-file", ""], "--text-file='' must not be empty"),
    "NUL": (["--text-file", "a\0b"], "must not hold a NUL byte"),
    "other field": (["--text-file", "records.jsonl", "--text-key", "x"], "--text-key='x' is not in a record"),
    "layer": (["--text", "a", "--layers", "2"], "--layers=2: the model has 2 layers, numbered from 0 to 1"),
    "layers": (["--text", "a", "--layers", "0-x"], "--layers=0-x must be numbers and ranges of them"),
    "range": (["--text", "a", "--layers", "1-0"], "--layers=1-0: the range 1-0 ends before it begins; try 0-1"),
    "negative": (["--text", "a", "--layers=-1"], "--layers=-1 must be numbers and ranges of them"),
    "head": (["--text", "a", "--heads", "0,4"], "--heads=0,4: the model has 4 heads, numbered from 0 to 3"),
    "huge": (["--text", "a", "--heads", "0-" + "9" * 30], "must be numbers and ranges of them"),
    "tokens": (["--text", "a", "--max-tokens", "0"], "--max-tokens=0 must be at least 1 and at most 1024"),
    "too many tokens": (["--text", "a", "--max-tokens", "1025"], "at most 1024"),
    "top": (["--text", "a", "--top-k", "21"], "--top-k=21 must be at least 1 and at most 20"),
    "part": (["--text", "a", "--show", "attention,dreams"], "--show=attention,dreams must name some of attention"),
    "no part": (["--text", "a", "--show", ""], "--show= must name some of"),
    "dtype": (["--text", "a", "--dtype", "int8"], "--dtype=int8 must be fp32, bf16 or fp16"),
    "sequences": (["--text", "a", "--sequences", "0"], "--sequences=0 must be at least 1"),
    "layers of no maps": (["--text", "a", "--show", "lens", "--layers", "0"], "--layers=0 goes with attention, and"),
    "heads of no maps": (["--text", "a", "--show", "experts", "--heads", "0"], "--heads=0 goes with attention"),
    "a field of no file": (["--text", "a", "--text-key", "body"], "--text-key=body works with --text-file only"),
    "no experts shown": (["--text", "a", "--show", "lens", "--sequences", "2"], "--show leaves them out"),
    "folder there": (["--text", "a", "--out", "there"], "--out=there is there already"),
    "no folder": (["--text", "a", "--out", "gone/new"], "must lie in a folder that is there"),
    "page in none": (["--text", "a", "--out", "gone/a.html"], "must lie in a folder that is there"),
    "page is a folder": (["--text", "a", "--out", "folder.html"], "must be a file that can be written to"),
    "empty out": (["--text", "a", "--out", ""], "--out= must not be empty"),
    "long name": (["--text", "a", "--out", "x" * 300], "must have names of at most 255 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_one_line_and_nothing_is_created(
    case: str, run: tuple[Path, Decoder], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("binary.bin").write_bytes(b"a\0b")
    Path("records.jsonl").write_text('{"text": "a"}\n')
    Path("there").mkdir()
    Path("folder.html").mkdir()
    before = sorted(tmp_path.rglob("*"))
    words, told = REFUSED[case]
    code, out, lines = asked(capsys, run[0], *words)
    assert code == 2 and out == "" and len(lines) == 1 and told in lines[0], lines
    assert "; " in lines[0] and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--show", "experts"], "--show=experts asks for experts, and CHECKPOINT's model has none (model.moe=null)"),
        (["--sequences", "4"], "--sequences=4 asks for experts, and CHECKPOINT's model has none"),
    ],
)
def test_a_dense_model_has_no_experts_to_show(
    words: list[str], told: str, dense: Path, tmp_path: Path, capsys: Captured
) -> None:
    code, _, (line,) = asked(capsys, dense, "--text", "a", *words, "--out", tmp_path / "new")
    assert code == 2 and told in line and list(tmp_path.iterdir()) == []
    report = report_of(capsys, dense, "--text", "a")
    assert report["parts"] == ["attention", "lens"] and "experts" not in report


def test_a_checkpoint_that_is_gone_or_has_no_tokenizer(dense: Path, tmp_path: Path, capsys: Captured) -> None:
    code, _, (line,) = asked(capsys, tmp_path / "gone", "--text", "a")
    assert code == 2 and line.startswith(f"CHECKPOINT={tmp_path / 'gone'} is not a folder; give a run directory")
    code, _, (line,) = asked(capsys, tmp_path, "--text", "a")
    assert code == 2 and "holds no checkpoint" in line
    code, _, (line,) = asked(capsys, dense / "checkpoints/step-00000006", "--text", "a")
    assert code == 2 and "is not a folder" in line


def test_more_maps_than_a_page_holds(
    run: tuple[Path, Decoder], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.inspection.asked.MOST_CELLS", 3000)  # 276 cells a map
    code, _, (line,) = asked(capsys, run[0], "--text", TEXT, "--text", TEXT, "--heads", "all")
    assert code == 2 and line.startswith(
        "2 layers x 4 heads of texts of 23, 23 tokens make more than the 3,000 numbers"
    )
    report = report_of(capsys, run[0], "--text", TEXT, "--text", TEXT)
    assert [len(layer["heads"]) for layer in report["texts"][0]["attention"]] == [2, 2], (
        "fewer, where none are asked for"
    )


def test_more_guesses_than_a_page_holds(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.inspection.asked.MOST_GUESSES", 300)  # three rows of 23 places
    code, _, (line,) = asked(capsys, run[0], "--text", TEXT, "--out", tmp_path / "a.html")
    told = (
        "--top-k=5 of 2 layers and texts of 23 tokens makes more than the 300 guesses that a page holds; try --top-k 4"
    )
    assert (code, line) == (2, told) and list(tmp_path.iterdir()) == []
    assert asked(capsys, run[0], "--text", TEXT, "--top-k", "4")[0] == 0
    assert asked(capsys, run[0], "--text", TEXT, "--show", "attention")[0] == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_a_folder_without_the_right_to_it(run: tuple[Path, Decoder], tmp_path: Path, capsys: Captured) -> None:
    tmp_path.chmod(0o500)
    assert asked(capsys, run[0], "--text", "a", "--out", tmp_path / "new")[0] == 2


def test_a_disk_that_fills_up_leaves_nothing(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> list[str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inspected_write, "draw_all", full)
    code, _, (line,) = asked(capsys, run[0], "--text", "a", "--out", tmp_path / "new")
    assert code == 2 and "cannot be written ([Errno 28] No space left on device)" in line
    assert list(tmp_path.iterdir()) == []


def test_planted_another_heads_map_is_told(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = inspected_attention.weights_of
    monkeypatch.setattr(inspected_attention, "weights_of", lambda *given: honest(*given).roll(1, dims=1))
    code, out, _ = asked(capsys, run[0], "--text", TEXT, "--out", tmp_path / "a.html")
    assert code == 1 and "attention: these are NOT the model's weights: times values they miss" in out
    assert '<li class="bad">attention: these are NOT' in (tmp_path / "a.html").read_text()


def test_planted_a_lens_without_the_final_norm_is_told(
    run: tuple[Path, Decoder], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspected_lens, "lens_logits", lambda model, residual: model.head(residual))
    code, out, _ = asked(capsys, run[0], "--text", TEXT)
    assert code == 1 and "lens: the last layer does NOT give those of the model" in out


@pytest.mark.slow
def test_through_the_real_command(run: tuple[Path, Decoder], tmp_path: Path) -> None:
    """A process of its own, from another folder, whose terminal is no UTF-8's."""
    words = ["inspect", str(run[0]), "--text", "def", "--text", "für \x1b[2J", "--show", "lens", "--out", "new"]
    command = [str(Path(sys.executable).parent / "roundtable"), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bit for bit" in done.stdout and "\x1b" not in done.stdout
    assert sorted(each.name for each in (tmp_path / "new").iterdir()) == [
        "inspect.html",
        "lens-text1.png",
        "lens-text2.png",
    ]


@pytest.mark.parametrize("most", [0.23, 0.61, 0.97])
def test_the_scale_of_a_pictures_colours_has_no_number_above_its_strongest(most: float) -> None:
    head = {"head": 0, "weights": [[most], [most, most]]}
    text = {"name": "text 1", "tokens": [1, 2], "token_texts": ["a", "b"]}
    figure = draw_attention(text, {"heads": [head], "layer": 0, "window": None})
    figure.canvas.draw()
    bar = figure.axes[-1]
    drawn = [each for each in bar.get_yticks() if bar.transData.transform((0, each))[1] <= bar.bbox.y1 + 0.5]
    assert len(drawn) > 1
    assert max(drawn) <= most


def test_layers_of_linear_attention_have_no_maps():
    """Tokens have no weights there: such a layer is not chosen, and refused by name where it is asked for."""
    kept = chosen_maps(Wishes(), 8, 4, [10], linear={0, 1, 2, 4, 5, 6})
    assert kept.layers == (3, 7) == chosen_maps(Wishes(layers="all"), 8, 4, [10], linear={0, 1, 2, 4, 5, 6}).layers
    with pytest.raises(UserError, match=r"--layers=2,3: layer 2 has linear attention.*; try --layers 3$"):
        chosen_maps(Wishes(layers="2,3"), 8, 4, [10], linear={0, 1, 2, 4, 5, 6})
    assert chosen_maps(Wishes(), 2, 4, [10], linear={0, 1}).layers == ()
    with pytest.raises(UserError, match=r"; leave it out$"):
        chosen_maps(Wishes(layers="1"), 2, 4, [10], linear={0, 1})
