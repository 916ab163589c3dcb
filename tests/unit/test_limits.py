"""Limits of the shell that are too small are told in a line; soft ones are raised."""

import os
import resource
import subprocess
import sys

import pytest

from launcher.cli import main
from launcher.errors import UserError
from launcher.limits import check_limits
from parallel.processes.world import ranks_on_node


@pytest.fixture
def limits(monkeypatch) -> dict[int, tuple[int, int]]:
    """The limits of a made-up shell, which setrlimit changes."""
    free = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    found = {resource.RLIMIT_NOFILE: (1024, 4096), resource.RLIMIT_AS: free, resource.RLIMIT_NPROC: (60, free[1])}
    found[resource.RLIMIT_MEMLOCK] = (64 << 10, free[1])
    monkeypatch.setattr(resource, "getrlimit", found.get)
    monkeypatch.setattr(resource, "setrlimit", found.__setitem__)
    return found


def test_soft_limits_are_raised(limits):
    check_limits(8)
    assert limits[resource.RLIMIT_NOFILE] == (4096, 4096)
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK):
        assert limits[limit] == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_small_limits_are_refused_together(limits):
    limits[resource.RLIMIT_NOFILE] = (24, 24)
    limits[resource.RLIMIT_AS] = (1 << 30, 1 << 30)
    with pytest.raises(UserError) as error:
        check_limits(2)
    files, space = error.value.problems
    assert files.startswith("ulimit -n=24 (open files of a process) must be at least 136; run `ulimit -n 136` before")
    assert space.startswith(
        "ulimit -v=1048576 (KiB of a process's address space) must be at least 4194304, since torch"
    )


@pytest.mark.parametrize("user", [0, 1000])
def test_too_few_processes_and_threads_are_refused_but_for_root(user, limits, monkeypatch):
    limits[resource.RLIMIT_NPROC] = (50, 55)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    check_limits(1)
    assert limits[resource.RLIMIT_NPROC] == (55, 55)
    if user == 0:
        check_limits(2)
        return
    with pytest.raises(UserError) as error:
        check_limits(2)
    (line,) = error.value.problems
    told = "ulimit -u=55 (all processes and threads of a user) must be at least 56; run `ulimit -u 4096` before"
    assert line.startswith(told)


def test_large_jobs_need_more(limits):
    with pytest.raises(UserError, match=r"ulimit -n=4096 .* must be at least 8128"):
        check_limits(2000)


def test_processes_are_those_of_one_node(limits, monkeypatch):
    """2,048 ranks have 40,976 processes and threads, but 176 on each of 256 nodes; the kernel counts those."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    limits[resource.RLIMIT_NOFILE], limits[resource.RLIMIT_NPROC] = (9000, 9000), (4096, 4096)
    with pytest.raises(UserError, match=r"ulimit -u=4096 .* must be at least 40976"):
        check_limits(2048)
    check_limits(2048, ranks_on_node(2048, {"SLURM_STEP_TASKS_PER_NODE": "8(x256)"}))


def test_the_ranks_of_a_node_are_those_of_the_largest():
    assert ranks_on_node(7, {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}) == 2
    assert ranks_on_node(8, {"RANK": "0", "LOCAL_WORLD_SIZE": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}) == 4
    assert ranks_on_node(8, {"RANK": "0"}) == ranks_on_node(8, {}) == 8


@pytest.mark.parametrize("command", ["train", "prove", "preflight"])
def test_more_ranks_than_a_machine_holds_are_refused(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("name: small\n")
    monkeypatch.chdir(tmp_path)
    assert main([command, "config.yaml", "--ranks", "100000"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--ranks=100000 must be at most 1024, since all are processes of this machine; lower it")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(("option", "value"), [("n", "24"), ("v", "900000")])
def test_command_refuses_in_one_line(tmp_path, option, value):
    train = f"{sys.executable} -m launcher train none.yaml"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -{option} {value}; {train}"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ulimit -{option}={value} ")
