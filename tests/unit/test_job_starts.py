"""What the job script does before and after each start of the ranks: bash itself, with srun and scontrol replaced."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from fake_programs import write_programs
from launcher.config.tree import RunConfig
from launcher.slurm.config import SlurmConfig
from launcher.slurm.profile import job_script
from launcher.slurm.script import render
from launcher.training.health import UNHEALTHY

# Each call of srun writes what it starts and its nodes into `steps`, and calls the test's `train` or `preflight`.
# $list are the nodes, and this is the $n-th call of its kind. A preflight's function prints the bad nodes, or fails;
# after `nothing` it has ended well and left no file.
SRUN = """\
list= kind=train
while [[ $1 ]]; do
  case $1 in --nodelist=*) list=${1#*=} ;; --bad-nodes) kind=preflight file=$2 ;; esac
  shift
done
n=$(grep -c "^$kind" steps 2>/dev/null)
n=$((n + 1))
echo "$kind $list" >> steps
if [[ $kind == train ]]; then
  train
  exit
fi
echo "$file" >> asked
said=$(preflight) || exit 1
[[ $said == nothing ]] && exit
echo "$said" > "$file"
[[ -z $said ]]
"""
SCONTROL = """\
[[ $1$2 == showhostnames ]] && printf 'n%d\\n' $(seq $(<n_nodes))
[[ $1$2 == showjob ]] && echo "   ReqNodeList=(null) ExcNodeList=(null)"
[[ $1 == requeue || $1 == update ]] && echo "$*" >> told
exit 0
"""


def run_job(
    folder: Path, functions: str, n_nodes: int, settings: SlurmConfig, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the job script on ``n_nodes`` nodes n1, n2, ..., where srun calls the bash ``functions``."""
    write_programs(folder, {"srun": functions + SRUN, "scontrol": SCONTROL, "sleep": "true", "scancel": "true"})
    (folder / "n_nodes").write_text(str(n_nodes))
    script = render(job_script("train"), RunConfig(run_dir="run", slurm=settings), "python")
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": f"n[1-{n_nodes}]", "SLURM_NTASKS_PER_NODE": "1"}
    given = {"PATH": f"{folder}:{os.environ['PATH']}", **job, **(environment or {})}
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=given, timeout=60, capture_output=True, text=True, check=False
    )


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize(("code", "n_starts"), [(2, 1), (UNHEALTHY, 1), (1, 2)])
def test_the_script_starts_again_only_what_may_end_otherwise(tmp_path, code, n_starts):
    """A run that health stopped met the same batch once for each of slurm.restarts."""
    done = run_job(tmp_path, f"train() {{ exit {code}; }}\n", 1, SlurmConfig(preflight=False, restarts=1))
    assert done.returncode == code
    assert lines_of(tmp_path / "steps") == ["train n1"] * n_starts


def test_the_second_try_of_a_preflight_asks_for_a_file_of_another_name(tmp_path):
    """The first node is broken; NFS would go on saying that the file it was asked for before is not there."""
    functions = "preflight() { [[ $list != n1* ]]; }; train() { true; }\n"
    done = run_job(tmp_path, functions, 3, SlurmConfig(nodes=2, spare_nodes=1), {"SLURM_RESTART_COUNT": "2"})
    assert done.returncode == 0 and "trains on n2 n3, without n1" in done.stdout, done.stdout + done.stderr
    assert lines_of(tmp_path / "steps") == ["preflight n1,n2,n3", "preflight n2,n3", "train n2,n3"]
    assert lines_of(tmp_path / "asked") == [f"run/preflight/job-1-start-2-try-{n}.bad" for n in (1, 2)]


def test_a_node_that_breaks_while_the_run_trains_is_replaced_by_a_spare_one(tmp_path):
    """All restarts took the nodes of the job's start, so that a broken GPU ended the job beside a node that idled."""
    functions = "preflight() { ((n == 1)) || echo n2; }; train() { [[ $list != *n2* ]]; }\n"
    done = run_job(tmp_path, functions, 3, SlurmConfig(nodes=2, spare_nodes=1))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trains on n1 n3, without n2" in done.stdout
    assert lines_of(tmp_path / "steps") == ["preflight n1,n2,n3", "train n1,n2", "preflight n1,n2,n3", "train n1,n3"]
    assert len(set(lines_of(tmp_path / "asked"))) == 2


def test_nodes_that_were_left_out_before_stay_so(tmp_path):
    """n3 is bad at the start, n2 after a failure: both are left out by the job that is queued again."""
    functions = "preflight() { ((n == 1)) && echo n3 || echo n2; }; train() { false; }\n"
    done = run_job(tmp_path, functions, 4, SlurmConfig(nodes=3, spare_nodes=1))
    assert done.returncode == 75, done.stdout + done.stderr
    assert lines_of(tmp_path / "steps") == ["preflight n1,n2,n3,n4", "train n1,n2,n4", "preflight n1,n2,n4"]
    assert lines_of(tmp_path / "told") == ["requeue 1", "update JobId=1 ExcNodeList=n3,n2"]


def test_a_job_of_one_node_that_breaks_goes_on_elsewhere(tmp_path):
    """At the start the cause of a bad only node may lie elsewhere; once it has passed and a run failed, it does not."""
    functions = "preflight() { ((n == 1)) || echo n1; }; train() { false; }\n"
    done = run_job(tmp_path, functions, 1, SlurmConfig())
    assert done.returncode == 75, done.stdout + done.stderr
    assert lines_of(tmp_path / "told") == ["requeue 1", "update JobId=1 ExcNodeList=n1"]
    at_start = run_job(tmp_path / "other", "preflight() { echo n1; }; train() { true; }\n", 1, SlurmConfig())
    assert at_start.returncode == 1 and "so many of 1 nodes" in at_start.stdout


def test_a_disk_that_is_away_after_a_failure_may_come_back(tmp_path):
    """Where most nodes are bad it is hardly they: it counts as one more failed start, and the next one looks again."""
    functions = "preflight() { ((n != 2)) || printf 'n1\\nn2\\n'; }; train() { ((n > 1)); }\n"
    done = run_job(tmp_path, functions, 3, SlurmConfig(nodes=3))
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines_of(tmp_path / "steps") == [
        *["preflight n1,n2,n3", "train n1,n2,n3"],
        *["preflight n1,n2,n3"] * 2,
        "train n1,n2,n3",
    ]
    gone = "preflight() { ((n == 1)) || printf 'n1\\nn2\\n'; }; train() { false; }\n"
    (tmp_path / "gone").mkdir()
    ended = run_job(tmp_path / "gone", gone, 3, SlurmConfig(nodes=3, restarts=2))
    assert ended.returncode == 1
    assert "failed with code 1, 3 in a row without a new checkpoint" in ended.stdout
    assert lines_of(tmp_path / "gone" / "steps") == [
        "preflight n1,n2,n3",
        "train n1,n2,n3",
        *["preflight n1,n2,n3"] * 2,
    ]


def test_a_preflight_without_a_verdict_after_a_failure_is_not_taken_for_the_end_of_the_run(tmp_path):
    functions = "preflight() { ((n == 1)) || echo nothing; }; train() { false; }\n"
    done = run_job(tmp_path, functions, 3, SlurmConfig(nodes=3, restarts=1))
    assert done.returncode == 1, done.stdout + done.stderr
    assert lines_of(tmp_path / "steps")[2:] == ["preflight n1,n2,n3", "preflight n2,n3"]


def test_a_notice_during_the_preflight_after_a_failure_ends_the_job_as_stopped(tmp_path):
    """Its own exit code, 0 where all nodes are good, must not be taken for the run's."""
    functions = "preflight() { ((n == 1)) || { kill -USR1 $(<pid); /bin/sleep 1; }; }; train() { false; }\n"
    functions += "[[ -e pid ]] || echo $PPID > pid\n"
    done = run_job(tmp_path, functions, 2, SlurmConfig(nodes=2, requeue=False))
    assert done.returncode == 75, done.stdout + done.stderr
    assert lines_of(tmp_path / "steps") == ["preflight n1,n2", "train n1,n2", "preflight n1,n2"]
