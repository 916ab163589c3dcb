"""A process that is tied to its parent ends with it: whatever it does itself, and however the parent forked it."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from launcher.estimate.command import command_of
from orphans import kill_and_see_all_end, lives, tree_of

CHILD = """\
import ctypes, os, signal, sys, time
sys.path[:0] = {path!r}
from parallel.processes.lifeline import end_with_job, end_with_parent
{tie}
print("tied", flush=True)
{work}
"""
WORK = {
    "waits": "time.sleep(100)",
    "keeps Python's lock": "ctypes.PyDLL(None).sleep(100)",
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}
# Waits for its child, or its main thread does.
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
PARENT_WHOSE_THREAD_ENDS = """\
import subprocess, sys, threading, time
thread = threading.Thread(target=lambda: subprocess.Popen([sys.executable, '-c', sys.argv[1]]))
thread.start()
thread.join()
time.sleep(100)
"""
# A step daemon that starts a shell, which starts the rank.
STEP_DAEMON = """\
import subprocess, sys
open("/proc/self/comm", "w").write("slurmstepd")
subprocess.run(["sh", "-c", '"$@"; true', "-", sys.executable, "-c", sys.argv[1]])
"""


def start(parent: str, work: str, tie: str = "end_with_job()") -> subprocess.Popen:
    """The parent, when its child is tied to it."""
    child = CHILD.format(path=sys.path, tie=tie, work=WORK[work])
    process = subprocess.Popen([sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "tied\n"
    return process


@pytest.mark.parametrize("work", WORK)
def test_child_ends_with_its_parent(work):
    process = start(PARENT, work)
    kill_and_see_all_end(process.pid, tree_of(process.pid))
    process.communicate()


def test_child_of_a_thread_that_ended_ends_with_the_process_alone():
    process = start(PARENT_WHOSE_THREAD_ENDS, "waits")
    time.sleep(0.2)
    tree = tree_of(process.pid)
    assert len(tree) == 2
    kill_and_see_all_end(process.pid, tree)
    process.communicate()


def test_child_ends_with_the_step_daemon_behind_a_shell():
    process = start(STEP_DAEMON, "waits")
    tree = tree_of(process.pid)
    assert len(tree) == 3
    shell, rank = tree[1:]
    os.kill(process.pid, signal.SIGKILL)
    rank.wait(10)
    shell.wait(10)
    process.communicate()


def test_a_child_that_can_open_no_more_files_lives_on():
    """It reads /proc to see what lies between the step daemon and itself, and took what it could not read for ended."""
    full = "import resource; limit = resource.RLIMIT_NOFILE; resource.setrlimit(limit, (3, 99)); time.sleep(3)"
    full += "; resource.setrlimit(limit, (99, 99)); print('lives')"  # at its end glibc loads a library for its threads
    process = subprocess.Popen(
        [sys.executable, "-c", STEP_DAEMON, CHILD.format(path=sys.path, tie="end_with_job()", work=full)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.communicate(timeout=60)[0] == "tied\nlives\n"


def test_child_whose_parent_has_ended_already_ends_at_once():
    child = CHILD.format(path=sys.path, tie=f"end_with_parent({os.getpid() + 1})", work=WORK["waits"])
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "", "")


def test_planted_child_that_is_not_tied_is_seen_to_live_on(monkeypatch):
    monkeypatch.setattr("orphans.ORPHAN_SECONDS", 0.3)
    process = start(PARENT, "waits", tie="")
    tree = tree_of(process.pid)
    with pytest.raises(AssertionError, match="left after"):
        kill_and_see_all_end(process.pid, tree)
    psutil.wait_procs(tree, timeout=5)
    assert not any(map(lives, tree))
    process.communicate()


def test_a_process_that_traces_leaves_ctrl_c_to_the_command(tmp_path):
    (tmp_path / "waits.py").write_text("def main():\n    print('here', flush=True)\n    print(input())\n")
    process = subprocess.Popen(
        command_of("waits"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # work in the background ignores it
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)  # as a terminal does to all processes of a command
        assert process.communicate("the answer\n", timeout=60) == ("the answer\n", "")
