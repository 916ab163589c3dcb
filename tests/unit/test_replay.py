"""What a replay judges and shows, without ranks: bounds, the record's reading, hostile text on terminal and page."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.dataset import Dataset
from data.opened import Source
from data.spans import document_parts
from data.tokenfile import TokenFile
from launcher.commands.replay import is_one_file
from launcher.errors import UserError
from launcher.replay.compare import agree, bounds_of, judge, moved_by, rounding_may_decide, rounding_notes
from launcher.replay.page import write_page
from launcher.replay.plan import Plan, choose_checkpoint
from launcher.replay.record import Record, Start, Update, read_record
from launcher.replay.report import DocumentPartSeen, DocumentSeen
from launcher.replay.show import print_documents, shade_of
from layout_runs import run_config, write_tokens

HOSTILE = [
    "plain",
    "</p><script>alert(1)</script>",
    "\x1b]0;title\x07",
    "\u202egnp.exe",
    '" onmouseover="x',
    "[bold]",
    "&amp;",
]
DOCUMENT = DocumentSeen(
    "<b>source", "a\x1b[2Jfile", 3, [DocumentPartSeen(7, [0, 1, 2, 3, 4, 5, 6], [0.1, 2.0, 9.0, math.nan, 30.0, 0.7])]
)


class Tags(HTMLParser):
    """The tags of a page, with the names of their attributes, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_hostile_text_and_holds_none_of_its_markup(tmp_path):
    write_page(tmp_path / "page.html", {"run": "<i>run", "step": 4}, [DOCUMENT], HOSTILE.__getitem__)
    page = (tmp_path / "page.html").read_text()
    found = Tags()
    found.feed(page)
    assert found.tags == {"html", "head", "meta", "title", "style", "body", "h1", "h2", "div", "p", "span"}
    assert found.attributes == {"lang", "charset", "http-equiv", "content", "style", "title"}
    assert "</p><script>alert(1)</script>" in found.text and '" onmouseover="x' in found.text and "&amp;" in found.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page)
    assert "http://" not in page and "https://" not in page and "default-src 'none'" in page


def test_a_terminal_obeys_nothing_in_the_documents(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_documents([DOCUMENT], HOSTILE.__getitem__)
    shown = capsys.readouterr().out
    without_colours = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", without_colours)
    assert "[bold]" in without_colours and "\\x1b]0;title\\x07" in without_colours


def test_a_file_is_known_by_any_of_its_names(tmp_path):
    there = tmp_path / "there"
    there.touch()
    (tmp_path / "hard").hardlink_to(there)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    assert is_one_file(there, tmp_path / "hard") and is_one_file(tmp_path / "link", tmp_path / "new")
    assert not is_one_file(there, tmp_path / "new")


def test_ids_are_shown_without_a_tokenizer(capsys):
    print_documents([DOCUMENT], None)
    assert "0 1 2 3 4 5 6" in capsys.readouterr().out


def test_dearer_tokens_are_darker():
    shades = [shade_of(loss) for loss in (0.1, 0.6, 2.0, 4.0, 6.0, 9.0, 20.0, math.nan)]
    assert shades[0] is None and len(set(shades)) == 7 and shades[-1] == shades[-2]


def test_numbers_agree_within_bounds_and_bit_for_bit():
    assert agree(1.0, 1.0, 0.0) and not agree(1.0, np.nextafter(1.0, 2), 0.0)
    assert agree(1.0, 1.0 + 9e-7, 1e-6) and not agree(1.0, 1.0 + 2e-6, 1e-6)
    assert agree(math.nan, math.nan, 0.0) and not agree(math.nan, 1.0, 1.0) and not agree(1.0, math.nan, 1.0)
    assert agree(math.inf, math.inf, 0.0) and not agree(math.inf, 1.0, 0.1) and not agree(1.0, math.inf, 0.1)
    assert agree(None, None, 0.0) and not agree(None, 1.0, 1.0)


def test_bounds_grow_with_the_steps_since_the_checkpoint():
    assert bounds_of("fp32", 3) == {
        "loss": pytest.approx(3e-6),
        "grad_norm": pytest.approx(3e-6),
        "lr": 0.0,
        "tokens": 0.0,
    }
    assert bounds_of("fp32", 1)["loss"] < bounds_of("fp16", 1)["loss"] < bounds_of("bf16", 1)["loss"] < 1e-3


def recorded(grad_norm: float, *, exact: bool = False, precision: str = "fp32") -> tuple[Plan, Record]:
    """One step after its checkpoint, with a loss of 2 and this norm on record."""
    config = run_config("tokens", precision=precision)
    plan = Plan("run", 7, 6, None, config, {7: config}, {7: ()}, 1, {7: exact}, ())
    return plan, Record({7: Update({"loss": 2.0, "grad_norm": grad_norm, "lr": 0.1, "tokens": 9}, Start(), ())})


def found(**changes: float) -> dict[int, tuple[dict, dict]]:
    """The row of that step, as it came out."""
    return {7: ({"loss": 2.0, "grad_norm": 10.0, "lr": 0.1, "tokens": 9} | changes, {})}


@pytest.mark.parametrize(
    ("off", "moved", "is_reproduced", "note"),
    [
        (2e-6, None, False, ""),
        (2e-6, 5e-7, False, ""),  # three times that is more than the bound, and still less than it is off
        (2e-6, 1e-6, True, "step 7: rounding alone moves grad_norm by 1.0e-06, so its bound is 3.0e-06"),
        (9e-5, 4e-5, True, "step 7: rounding alone moves grad_norm by 4.0e-05, so its bound is 1.0e-04"),
        (2e-4, 1.0, False, "step 7: rounding alone moves grad_norm by 1.0e+00, so its bound is 1.0e-04"),
        (5e-7, 1e-7, True, ""),
    ],
)
def test_a_number_may_be_three_times_as_far_as_rounding_moves_it(off, moved, is_reproduced, note):
    plan, record = recorded(10.0 * (1 + off))
    by_rounding = None if moved is None else {7: {"loss": 0.0, "grad_norm": moved}}
    (verdict,) = judge(plan, record, found(), by_rounding)
    assert (not verdict.differences) == is_reproduced and verdict.bounds["loss"] == 1e-6
    assert ([line for line in rounding_notes([verdict]) if moved != 5e-7] or [""]) == [note]


def test_the_own_layouts_bits_are_held_to_themselves_whatever_rounding_does():
    plan, record = recorded(10.0 * (1 + 2e-6), exact=True)
    (verdict,) = judge(plan, record, found(), {7: {"loss": 1.0, "grad_norm": 1.0}})
    assert [each.key for each in verdict.differences] == ["grad_norm"] and set(verdict.bounds.values()) == {0.0}
    assert rounding_notes([verdict]) == []


def test_rounding_is_asked_where_it_may_be_why_steps_differ_and_nowhere_else():
    def asked(off: float, changes: dict[str, float] | None = None, **given: Any) -> bool:
        plan, record = recorded(10.0 * (1 + off), **given)
        return rounding_may_decide(plan, judge(plan, record, found(**(changes or {}))))

    assert asked(2e-6) and asked(9e-5) and asked(0.0, {"loss": 2.0 * (1 + 2e-6)})
    assert not asked(5e-7), "reproduced"
    assert not asked(2e-4), "beyond what rounding may be"
    assert not asked(2e-6, {"tokens": 8}) and not asked(2e-6, {"lr": 0.2}) and not asked(2e-6, {"loss": 2.1})
    assert not asked(2e-6, {"loss": math.nan}) and not asked(2e-6, exact=True) and not asked(0.2, precision="bf16")


def test_how_far_rounding_moves_is_told_of_the_farthest_draw():
    base, far = {7: {"loss": 2.0, "grad_norm": 10.0}}, {"loss": 2.0, "grad_norm": 9.0}
    assert moved_by(base, [{7: {"loss": 2.5, "grad_norm": 10.5}}, {7: far}]) == {7: {"loss": 0.25, "grad_norm": 0.1}}
    assert moved_by(base, [{7: far | {"loss": math.nan}}]) == {7: {"loss": 0.0, "grad_norm": 0.1}}
    assert moved_by({7: far | {"loss": 0.0}}, [{7: far}]) == {7: {"loss": 0.0, "grad_norm": 0.0}}


ROWS = [
    {"step": 0, "event": "start", "ranks": 2, "config_sha256": "aa"},
    {"step": 1, "loss": 3.0, "tokens": 10},
    {"step": 1, "event": "checkpoint"},
    {"step": 1, "event": "rollback", "samples_left_out": [8, 16]},
    {"step": 2, "loss": 2.0, "tokens": 20},
    {"step": 2, "event": "checkpoint"},
    {"step": 2, "event": "start", "ranks": 4, "config_sha256": "bb"},
    {"step": 3, "loss": "NaN", "tokens": 30},
    {"step": 3, "event": "rollback", "samples_left_out": [32, 40]},
]


def written(folder: Path, rows: list[dict]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_record_knows_each_steps_start_and_what_was_left_out(tmp_path):
    record = read_record(written(tmp_path, ROWS))
    assert [record.updates[step].start.ranks for step in (1, 2, 3)] == [2, 2, 4]
    assert [record.updates[step].skipped for step in (1, 2, 3)] == [(), ((8, 16),), ((8, 16),)]
    assert math.isnan(record.updates[3].numbers["loss"]) and record.last == 3


def test_a_rollback_that_a_crash_undid_leaves_nothing_out(tmp_path):
    """The next start is at a checkpoint from before it, which knows of no samples to leave out."""
    rows = [*ROWS[:4], {"step": 1, "event": "start", "ranks": 2}, {"step": 2, "loss": 2.0, "tokens": 20}]
    assert read_record(written(tmp_path, rows)).updates[2].skipped == ()


@pytest.mark.parametrize("row", [{"step": 1, "event": "rollback"}, {"step": 2, "loss": 1.0, "lr": "fast"}])
def test_a_damaged_record_is_refused_in_a_line(tmp_path, row):
    with pytest.raises(UserError) as found:
        read_record(written(tmp_path, [*ROWS[:3], row]))
    assert len(found.value.problems) == 1 and "put the file back" in found.value.problems[0]


def test_the_nearest_checkpoint_before_the_step_is_taken():
    record = Record(saved={0: (), 2: (), 4: (), 6: ()})
    run = Path("run")
    assert choose_checkpoint(run, record, 5, [2, 4, 6], None) == 4
    assert choose_checkpoint(run, record, 4, [2, 4, 6], None) == 2
    assert choose_checkpoint(run, record, 2, [2, 4, 6], None) == 0  # none was saved before
    assert choose_checkpoint(run, record, 5, [2, 4, 6], 0) == 0
    with pytest.raises(UserError, match=r"those of run \(after 2\) are gone; give --from 0"):
        choose_checkpoint(run, record, 4, [4, 6], None)
    with pytest.raises(UserError, match=r"--from=4 must be 0 or the step of a checkpoint before step 4"):
        choose_checkpoint(run, record, 4, [2, 4], 4)


def test_the_parts_of_documents_are_those_of_the_batch(tmp_path):
    """Against the packed batch's own numbering, and the file's documents one by one."""
    file = TokenFile(write_tokens(tmp_path))
    dataset = Dataset([Source(1.0, (file,), trusted=True, name="s")], seq_len=24, seed=0, vocab_size=96, shuffled=True)
    indices = np.arange(dataset.n_samples)
    batch, starts = dataset.read(indices), file.all_starts().tolist()
    seen = np.full(batch.tokens_BS.shape, -1)
    numbers: dict[int, int] = {}
    for part in document_parts(dataset, indices):
        number = numbers.setdefault(part.row, 0)
        numbers[part.row] += 1
        seen[part.row, part.first : part.stop] = number
        length = part.stop - part.first
        text = file.tokens[starts[part.document] : [*starts, file.n_tokens][part.document + 1]].tolist()
        mine = batch.tokens_BS[part.row, part.first : part.stop].tolist()
        assert any(text[at : at + length] == mine for at in range(len(text) - length + 1)) and part.source == "s"
    assert (seen == batch.documents_BS).all()
