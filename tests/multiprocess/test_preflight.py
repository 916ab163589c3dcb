"""The preflight by local processes that stand for nodes: what is measured, and what is said of broken ones."""

from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.preflight.judge import judge
from parallel.preflight.findings import Device, Disk, Findings, Link
from preflight_runs import Seen, preflight


def findings(seen: Seen) -> Findings:
    """Rank 0's, made again from JSON."""
    found: dict[str, Any] = seen.findings or {}
    kinds = {"devices": Device, "within": Link, "pairs": Link, "disks": Disk}
    again = {key: tuple(kind(**_tuples(each)) for each in found[key]) for key, kind in kinds.items()}
    whole = Link(**_tuples(found["whole"])) if found["whole"] else None
    return Findings(**{**_tuples(found), **again, "whole": whole})


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def test_three_nodes_of_two_ranks_are_measured(tmp_path):
    seen = preflight(["n1", "n1", "n2", "n2", "n3", "n3"], tmp_path)
    assert [each.code for each in seen] == [0] * 6
    assert [each.findings is None for each in seen] == [False, *[True] * 5]
    found = findings(seen[0])
    assert found.nodes == ("n1", "n2", "n3")
    assert [(each.rank, each.node) for each in found.devices] == list(enumerate(["n1", "n1", "n2", "n2", "n3", "n3"]))
    assert all(each.matmul_tflops >= each.matmul_worst_tflops > 0 for each in found.devices)
    assert [each.nodes for each in found.within] == [("n1",), ("n2",), ("n3",)]
    assert sorted(each.nodes for each in found.pairs) == [("n1", "n2"), ("n1", "n3"), ("n2", "n3")]
    links = [*found.within, *found.pairs, found.whole]
    assert all(each and each.all_reduce_gb_per_second and each.all_to_all_gb_per_second for each in links)
    assert [(each.node, each.reads_from, each.misses) for each in found.disks] == [
        ("n1", "n2", ()),
        ("n2", "n3", ()),
        ("n3", "n1", ()),
    ]
    assert judge(found).bad_nodes == []
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.slow
def test_planted_faults_are_told_apart_and_not_held_against_the_partner(tmp_path):
    """n1 and n7 are well; n3 has met n4, and stops when it is to meet n7."""
    faults = {1: "a wrong product", 2: "stopped at its second meeting", 3: "a disk of its own"}
    faults |= {4: "forgetful memory", 5: "no config"}
    seen = preflight([f"n{number}" for number in range(1, 8)], tmp_path, faults)
    assert [seen[rank].code for rank in (0, 1, 3, 4, 5, 6)] == [0] * 6
    judgement = judge(findings(seen[0]))
    assert {each.node: each.reasons for each in judgement.verdicts} == {
        "n1": (),
        "n2": ("rank 1, matrix products: 1 of the 65536 elements of a matrix product are wrong",),
        "n3": ("rank 2, pairs, round 2: no answer within 20 s",),
        "n4": ("the run directory is not on a disk that it shares with n1, n7: files are not seen",),
        "n5": ("rank 4, memory: 1 of 1048576 words of memory came back wrong",),
        "n6": ("rank 5: run.yaml: no such file; check it",),
        "n7": (),
    }


@pytest.mark.slow
def test_a_call_that_never_returns_on_rank_0_costs_its_node_and_not_the_verdict(tmp_path):
    """As NCCL's do where a peer cannot be reached: n1 and n2 are to meet in the second round."""
    seen = preflight(["n1", "n2", "n3", "n4"], tmp_path, dict.fromkeys([0, 2], "stuck at its second meeting"))
    assert [each.code for each in seen] == [0] * 4
    assert {each.node: each.reasons for each in judge(findings(seen[0])).verdicts} == {
        "n1": ("rank 0, pairs, round 2: no answer within 20 s",),
        "n2": (),
        "n3": ("rank 2, pairs, round 2: no answer within 20 s",),
        "n4": (),
    }


@pytest.mark.parametrize(("ranks", "is_disagreement"), [([0, 1, 2], True), ([0], False)], ids=["all", "rank 0"])
def test_planted_missing_config_of_all_ranks_is_the_users_mistake(tmp_path, ranks, is_disagreement):
    seen = preflight(["n1", "n2", "n3"], tmp_path, dict.fromkeys(ranks, "no config"))
    for each in seen:
        assert (each.lines, each.is_disagreement) == (["run.yaml: no such file; check it"], is_disagreement)
    assert not (tmp_path / "shared").exists()


@pytest.mark.slow
def test_planted_death_of_rank_0_is_told_by_the_others(tmp_path):
    seen = preflight(["n1", "n2", "n3"], tmp_path, {0: "killed in the memory test"})
    assert seen[0].code == -9
    assert [each.lines for each in seen[1:]] == [["rank 0 on n1 ended or was cut off in 'memory'"]] * 2


@pytest.mark.slow
def test_a_machine_alone_is_measured_by_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("name: alone\ndata: {sources: [{path: none.txt}]}\n")
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "bad"
    assert main(["preflight", "config.yaml", "--ranks", "2", "--bad-nodes", str(bad)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[2].split()[-1] == "ok"
    assert rows[3:-1] == ["note: one node: nothing between nodes was measured"]
    assert bad.read_text() == ""
    (kept,) = Path("runs/alone/preflight").iterdir()
    assert kept.suffix == ".json"


def test_an_earlier_list_of_bad_nodes_is_gone_where_there_is_no_verdict(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("name: alone\n")
    (tmp_path / "bad").write_text("n7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launcher.commands.preflight.measure_here", lambda config, n_ranks: 1)
    assert main(["preflight", "config.yaml", "--ranks", "2", "--bad-nodes", "bad"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(("bad", "rule"), [("", "must not be empty"), ("folder", "must be a file, and is a folder")])
def test_a_list_that_cannot_be_written_is_refused_before_anything_is_measured(bad, rule, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("name: alone\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["preflight", "config.yaml", "--bad-nodes", bad]) == 2
    assert capsys.readouterr().err == f"--bad-nodes={bad} {rule}; choose another file\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "folder"]


def test_planted_wrong_override_creates_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("name: alone\n")
    monkeypatch.chdir(tmp_path)
    assert main(["preflight", "config.yaml", "train.start_seconds=0"]) == 2
    assert capsys.readouterr().err == "train.start_seconds=0 must be at least 1; try 300\n"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
