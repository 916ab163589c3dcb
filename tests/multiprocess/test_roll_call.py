"""The roll call: who is missing or differs is named on every rank, within the limit."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from launcher.guard.agreement import Agreed, check_shared, facts
from launcher.watch.metrics import read_metrics
from layout_runs import run_config, write_tokens
from parallel.processes.environment import TOKEN
from parallel.processes.rendezvous import ForeignStore, listen_for_ranks, signed, verified
from parallel.processes.roll_call import RollCall, RollCallError
from parallel.processes.start import RankError, run_ranks

HOSTS = ["n1", "n1", "n2", "n2"]


def answer(fault: str | None, folder: str) -> tuple[bool, list[str]]:
    """One rank's roll call; with a fault of rank 2. Whether it is a disagreement, and its lines."""
    rank = int(os.environ["RANK"])
    limit = 60.0 if fault not in ("absent", "other job") else 6.0
    if fault == "other job" and rank == 2:
        os.environ[TOKEN] = "its own"
    if fault == "absent" and rank == 2:
        return False, []
    run_path = Path(folder) / (f"node-{rank}" if fault == "not shared" and rank == 2 else "shared")
    run_path.mkdir(exist_ok=True)
    try:
        roll = RollCall(limit, HOSTS)
        if fault == "stranger" and rank == 2:
            roll._set = roll.store.set  # who reaches the store, and knows the name of all, but not the token
        roll.agree("facts", facts(RunConfig()) | ({"torch": "1.0"} if fault == "other torch" and rank == 2 else {}))
        roll.fail_together("claim", ["a=1 must be 2; try 2"] if fault == "refused" and rank == 2 else [])
        check_shared(roll, run_path, seconds=3.0)
    except RollCallError as error:
        return error.is_disagreement, error.lines
    return False, []


def call(fault: str | None, folder: Path) -> list[Any]:
    return run_ranks(
        answer, 4, fault, str(folder), timeout_seconds=240, threads=1, preload=["launcher.guard.agreement"]
    )


def test_ranks_that_agree_go_on(tmp_path):
    assert call(None, tmp_path) == [(False, [])] * 4
    assert list((tmp_path / "shared").iterdir()) == []


def opened(nodes: list[str], late: bool) -> tuple[list[str], int]:
    """One rank's facts, on a made-up node, and how many of our files it has opened; ``late``: rank 0 begins late."""
    from launcher.guard import agreement
    from parallel.processes import roll_call

    rank, files, root, look = int(os.environ["RANK"]), set(), str(agreement.ROOT), agreement.code_facts

    def note(event: str, given: Any) -> None:
        if event == "open" and str(given[0]).startswith(root) and str(given[0]).endswith(".py"):
            files.add(given[0])

    sys.addaudithook(note)
    roll_call.socket.gethostname = lambda: nodes[rank]
    roll = RollCall(60.0)
    if late:
        roll_call.NODE_SECONDS = 0.5
        agreement.code_facts = lambda: (time.sleep(3.0 if rank == 0 else 0.0), look())[1]
        time.sleep(0.0 if rank == 0 else 0.3)
    found = facts(RunConfig(), roll)
    roll.agree("facts", found)
    return sorted(found), len(files)


def open_on(nodes: list[str], *, late: bool = False) -> list[int]:
    """The files that each rank opened; all ranks have found what one process finds."""
    options: Any = {"timeout_seconds": 120, "threads": 1, "preload": ["launcher.guard.agreement"]}
    found = run_ranks(opened, len(nodes), nodes, late, **options)
    assert all(names == sorted(facts(RunConfig())) for names, _ in found)
    return [n_files for _, n_files in found]


@pytest.mark.parametrize("nodes", [["n1"] * 4, HOSTS, ["n1", "n2", "n3", "n4"]], ids=["one", "two", "four"])
def test_our_files_are_read_once_a_node(nodes):
    """The code that the roll call compares: by one rank of each node, whoever comes first."""
    n_files = open_on(nodes)
    for node in set(nodes):
        *others, most = sorted(n for n, here in zip(n_files, nodes, strict=True) if here == node)
        assert most > 200 and set(others) <= {0}, n_files


@pytest.mark.slow
def test_a_rank_does_not_wait_long_for_another_of_its_node():
    assert min(open_on(["n1", "n1"], late=True)) > 200


@pytest.mark.slow
def test_planted_absence_is_named_on_every_rank_that_is_there(tmp_path):
    line = "no answer from rank 2 on n2 within 6 s (train.start_seconds); the other 3 of 4 ranks are there"
    assert call("absent", tmp_path) == [(False, [line]), (False, [line]), (False, []), (False, [line])]


def test_planted_other_version_is_named_on_every_rank(tmp_path):
    torch = facts(RunConfig())["torch"]
    line = f"torch must be the same on all ranks, and is {torch} on ranks 0-1, 3 (n1, n2); 1.0 on rank 2 (n2)"
    for is_disagreement, lines in call("other torch", tmp_path):
        assert is_disagreement
        assert [each.partition("; make ")[0] for each in lines] == [line]


def test_planted_refusal_of_one_rank_is_that_of_all(tmp_path):
    assert call("refused", tmp_path) == [(True, ["a=1 must be 2; try 2"])] * 4


def test_planted_word_of_a_stranger_is_refused_on_every_rank(tmp_path):
    for is_disagreement, lines in call("stranger", tmp_path):
        assert not is_disagreement
        (line,) = lines
        assert line.startswith("rank 0 on n1: 'facts/2' in the store was not written by a rank of this job; choose ")


@pytest.mark.slow
def test_planted_rank_of_another_job_is_refused_at_once(tmp_path):
    found = call("other job", tmp_path)
    _, (line,) = found.pop(2)
    absent = "no answer from rank 2 on n2 within 6 s (train.start_seconds); the other 3 of 4 ranks are there"
    assert found == [(False, [absent])] * 3
    assert "is that of another job; choose another MASTER_PORT, and set ROUNDTABLE_TOKEN to one secret word" in line


def test_signature_holds_for_one_key_one_start_and_one_token(monkeypatch):
    monkeypatch.setenv(TOKEN, "secret")
    value = signed("facts/1", "text").encode()
    assert verified("facts/1", value) == "text"
    for key, forged in [("facts/2", value), ("facts/1", value + b"!"), ("facts/1", b"text"), ("facts/1", b"\xff")]:
        with pytest.raises(ForeignStore, match=f"'{key}' in the store was not written by a rank of this job"):
            verified(key, forged)
    for name, other in {TOKEN: "other", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, other)
            with pytest.raises(ForeignStore):
                verified("facts/1", value)


def interfaces(host: str, monkeypatch, **variables: str) -> list[str]:
    """Where rank 0 listens when the others reach it at ``host``."""
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    with listen_for_ranks(host) as listener:
        return [listener.getsockname()[0]]


def test_rank_0_listens_on_the_interface_of_its_address_alone(monkeypatch):
    everywhere = ["::"] if socket.has_dualstack_ipv6() else ["0.0.0.0"]
    assert interfaces("127.0.0.1", monkeypatch, LOCAL_WORLD_SIZE="4") == ["127.0.0.1"]
    assert interfaces("localhost", monkeypatch, LOCAL_WORLD_SIZE="4")[0] in ("127.0.0.1", "::1")
    assert interfaces("::ffff:127.0.0.1", monkeypatch, LOCAL_WORLD_SIZE="4") == ["127.0.0.1"]
    assert interfaces("127.0.0.1", monkeypatch, SLURM_STEP_NUM_NODES="1") == ["127.0.0.1"]
    monkeypatch.delenv("SLURM_STEP_NUM_NODES")
    assert interfaces("127.0.1.1", monkeypatch) == everywhere  # a machine's own name, on Debian, and ranks elsewhere
    assert interfaces("192.0.2.1", monkeypatch) == everywhere  # a service's address
    assert interfaces("no-such-host.invalid", monkeypatch) == everywhere
    for own in {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None, family=socket.AF_INET)}:
        if not own.startswith("127."):
            assert interfaces(str(own), monkeypatch) == [own]


def meet_at_a_port_that_is_taken(folder: str) -> list[str]:
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))), pytest.raises(RollCallError) as error:
        RollCall(60, HOSTS)
    return error.value.lines


def test_port_that_is_taken_is_named():
    ((line,),) = run_ranks(meet_at_a_port_that_is_taken, 1, "", timeout_seconds=120, threads=1)
    assert line.startswith("rank 0 on n1 must be able to listen at MASTER_ADDR=127.0.0.1 and MASTER_PORT=")
    assert line.endswith(", and cannot: Address already in use; choose another MASTER_PORT")


def test_planted_run_directory_that_one_node_does_not_share(tmp_path):
    for is_disagreement, lines in call("not shared", tmp_path):
        assert is_disagreement
        assert len(lines) == 1
        assert "must be on a file system that the nodes share, but n2 does not see" in lines[0]


def meet_nobody(folder: str) -> None:
    """Rank 0 never listens."""
    if os.environ["RANK"] == "0":
        return
    RollCall(3, HOSTS)


@pytest.mark.slow
def test_planted_rank_0_that_does_not_listen_is_named():
    with pytest.raises(RankError, match=r"could not reach rank 0 on n1 at 127\.0\.0\.1:\d+ within 3 s"):
        run_ranks(meet_nobody, 2, "", timeout_seconds=120, threads=1)


def test_facts_see_an_edit_that_no_commit_holds(tmp_path, monkeypatch):
    from launcher.guard import agreement

    before = agreement.hash_of_code()
    package = tmp_path / "launcher"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(agreement, "ROOT", tmp_path)
    first = agreement.hash_of_code()
    (package / "a.py").write_text("x = 2\n")
    assert len({before, first, agreement.hash_of_code()}) == 3
    assert agreement.commit() == "none"


@pytest.mark.slow
class EndsLast:
    """What Python takes down last, its handlers of signals and all modules being gone: SIGTERM comes then."""

    def __del__(self, kill: Callable[[int, int], None] = os.kill) -> None:
        """As srun sends it."""
        kill(0, 15)


def end_with_three(while_waiting: bool) -> None:
    """A rank's end, with exit code 3."""

    def come(*_: Any) -> None:
        if while_waiting:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(50)

    vars(sys)["ends_last"] = EndsLast()
    Agreed(cast(Any, SimpleNamespace(fail_together=come)), None).leave(3)
    sys.exit(3)


@pytest.mark.parametrize("while_waiting", [True, False])
def test_a_rank_that_is_ended_while_it_ends_keeps_its_exit_code(while_waiting: bool) -> None:
    """The first exit with a code that is not 0 has srun end the others; the job script goes by the highest code."""
    program = f"from test_roll_call import end_with_three; end_with_three({while_waiting})"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": paths}
    assert subprocess.run(command, timeout=100, env=environment, start_new_session=True).returncode == 3


def test_under_torchrun_the_roll_is_called_over_the_agents_store(tmp_path):
    config = replace(run_config(write_tokens(tmp_path), steps=2), name="small")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    done = subprocess.run(
        [*command, "--rdzv-endpoint=localhost:0", "-m", "launcher", "train", "config.yaml"],
        cwd=tmp_path,
        env={**clean, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in read_metrics(tmp_path / "runs/small/metrics.jsonl") if "loss" in row]
    assert len(losses) == 2
