"""What the shell that submits says of other jobs does not change this one; the Slurm here notes what it is given."""

import os
from pathlib import Path

import pytest

from fake_programs import write_programs
from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.slurm.config import SlurmConfig
from launcher.slurm.queue import gpu_types, has_ended, live_jobs
from launcher.slurm.shell import for_sbatch
from layout_runs import run_config, write_tokens

SINFO = "main*|4|gpu:8|infinite\nshort|4|gpu:8|30:00\nsmall|1|(null)|infinite"
FAKES = {
    "sinfo": f'case "$*" in *%D*) echo "{SINFO}";; *) echo "main*|gpu:h100:8\nshort|gpu:a100:8";; esac',
    "squeue": ":",
    "scancel": '[ -e no-scancel ] && exit 1; echo "$@" > cancelled',
    "sbatch": '[ $(wc -l < queued) -ge $(cat most) ] && echo "sbatch: QOSMaxSubmitJobPerUserLimit" >&2 && exit 1; '
    '[ "$1" = --parsable ] && echo >> queued; env > "$1.env"; [ "$1" = --test-only ] && cat > given.sbatch || echo 7',
}
SLURM = {"slurm.tasks_per_node": 1, "slurm.gpus_per_node": 0, "slurm.notice_seconds": 60, "slurm.time_minutes": 60}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    write_programs(tmp_path / "bin", FAKES)
    (tmp_path / "config.yaml").write_text(dump_config(run_config(write_tokens(tmp_path), steps=2)))
    (tmp_path / "queued").touch()
    (tmp_path / "most").write_text("100")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(*overrides: str) -> int:
    given = [f"{key}={value}" for key, value in SLURM.items()]
    return main(["submit", "config.yaml", "metrics.wandb.mode=disabled", *given, *overrides])


def seen(folder: Path, call: str = "--parsable") -> dict[str, str]:
    """The variables of Slurm's that a call of sbatch had."""
    lines = (line.partition("=") for line in (folder / f"{call}.env").read_text().splitlines())
    return {name: value for name, _, value in lines if name.startswith(("SLURM_", "SBATCH_"))}


def test_what_the_shell_says_does_not_outdo_the_script(folder, monkeypatch):
    said = {"TIMELIMIT": "3", "NO_REQUEUE": "1", "SIGNAL": "USR2@30", "ARRAY_INX": "0-3", "WAIT": "1", "QOS": "low"}
    for name, value in {**said, "ACCOUNT": "other", "RESERVATION": "week"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    assert submit("slurm.account=mine") == 0
    assert seen(folder) == seen(folder, "--test-only") == {"SBATCH_QOS": "low", "SBATCH_RESERVATION": "week"}
    for name in ("REQ_SWITCH", "WAIT4SWITCH", "WCKEY", "THREADS_PER_CORE"):
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    assert submit("slurm.account=mine", "slurm.options=[reservation=mine,switches=1,threads-per-core=1]") == 0
    assert seen(folder) == {"SBATCH_QOS": "low", "SBATCH_WCKEY": "1"}


def test_a_job_that_is_submitted_from_another_has_none_of_its_variables(folder, monkeypatch):
    """srun reads SLURM_GPUS_PER_TASK and SLURM_CPU_BIND, which Slurm does not set anew for a job without them."""
    for name, value in {"GPUS_PER_TASK": "1", "CPU_BIND": "quiet,mask_cpu:0x1", "CONF": "/etc/slurm.conf"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert for_sbatch(SlurmConfig()).keys() >= {"SLURM_GPUS_PER_TASK", "SLURM_CPU_BIND"}  # a user's own
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_EXACT", "1")
    assert submit("slurm.environment=[SLURM_EXACT]") == 0
    assert seen(folder) == {"SLURM_CONF": "/etc/slurm.conf", "SLURM_EXACT": "1"}


def test_the_shells_partition_is_looked_at_where_the_config_names_none(folder, monkeypatch, capsys):
    monkeypatch.setenv("SBATCH_PARTITION", "short")
    assert submit("slurm.time_minutes=100") == 2
    assert capsys.readouterr().err.startswith("slurm.time_minutes=100 must be at most the 30 that partition short ")
    assert gpu_types(None) == ["a100"]
    assert submit("slurm.time_minutes=100", "slurm.partition=main") == 0
    assert seen(folder) == {}
    monkeypatch.setenv("SBATCH_PARTITION", "none")
    assert submit() == 2
    assert "SBATCH_PARTITION=none must be a partition of this cluster; try " in capsys.readouterr().err


def test_hidden_partitions_and_the_jobs_in_them_are_seen(folder, capsys):
    """Slurm's commands leave them out without -a, also for those who may use them."""
    hidden = "case \" $* \" in *' -a '*) echo '{}';; esac"
    write_programs(folder / "bin", {"sinfo": hidden.format("secret|4|gpu:8|infinite"), "squeue": ":"})
    assert submit("slurm.partition=secret") == 0
    job = f"7|RUNNING|None|n1|1:00|1:00:00|roundtable:{folder}/run"
    write_programs(folder / "bin", {"squeue": hidden.format(job)})
    assert [job.job_id for job in live_jobs()] == ["7"]


def test_the_jobs_number_is_found_in_what_a_sites_own_sbatch_prints(folder, capsys):
    talks = 'printf "Welcome to the cluster\\n--> Verifying the queue...OK\\n\\n41;big\\n"'
    write_programs(folder / "bin", {"sbatch": f'[ "$1" = --test-only ] || {talks}'})
    assert submit() == 0
    assert capsys.readouterr().out.startswith("job 41: trains runs/run on 1 node, 1 process on each\n")


def test_the_users_own_choice_of_what_slurm_lists_hides_no_job(folder, monkeypatch):
    """With SQUEUE_PARTITION=debug a live job elsewhere had "ended", and its run directory could be taken over."""
    write_programs(folder / "bin", {"squeue": 'env > squeue.env; [ -n "$SQUEUE_PARTITION" ] || echo 7'})
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    assert not has_ended("7")
    given = (folder / "squeue.env").read_text()
    assert "SQUEUE_" not in given and "SLURM_CONF=/etc/slurm.conf\n" in given


def test_a_container_needs_an_interpreter_of_its_own(folder, capsys):
    assert submit("slurm.container=image.sqsh") == 2
    line = "slurm.container='image.sqsh' needs slurm.python, the interpreter within the container, since the one that "
    assert capsys.readouterr().err.startswith(line)
    assert submit("slurm.container=image.sqsh", "slurm.python=python3") == 0


def test_a_job_may_wait_for_nodes_that_are_down(folder, capsys):
    """`sbatch --test-only` looks at nodes that are up alone, and refuses what sbatch itself lets wait."""
    refuses = 'echo "allocation failure: Requested node configuration is not available" >&2; exit 1'
    write_programs(folder / "bin", {"sbatch": f'[ "$1" = --test-only ] && {{ {refuses}; }}; echo 7'})
    counts = 'case "$*" in *%F*) echo "main*|1/$(cat idle)/1/4"; exit;; esac; '
    write_programs(folder / "bin", {"sinfo": counts + FAKES["sinfo"]})
    given = ("slurm.nodes=4", "train.global_batch_size=16")
    (folder / "idle").write_text("2")
    assert submit(*given) == 0
    assert capsys.readouterr().err == (
        "warning: only 3 nodes of the partition are up, and the job of 4 waits for the others; "
        "`sinfo -R` says why they are not\n"
    )
    (folder / "idle").write_text("3")
    assert submit(*given) == 2
    line = "slurm.nodes=4: sbatch does not take the job: allocation failure: Requested node configuration is not "
    assert capsys.readouterr().err.startswith(line)


def test_processes_with_gpus_and_hardly_any_cores_are_told(folder, capsys):
    """Slurm gives a process one core where none are asked for, and says of how many it thinks when it is asked."""
    thinks = 'echo "sbatch: Job 9 to start at 2026-11-29T00:00:00 using $(cat cores) processors on nodes n1" >&2'
    write_programs(folder / "bin", {"sbatch": f'[ "$1" = --test-only ] && {thinks} || echo 7'})
    warned = (
        "warning: Slurm gives the 2 processes 6 processors in all, and one with a GPU is slow on fewer than 4; "
        "set slurm.cpus_per_task to its share of a node's cores\n"
    )
    two = ("slurm.gpus_per_node=2", "slurm.tasks_per_node=null")
    for cores, given, told in (
        ("6", two, warned),
        ("8", two, ""),
        ("6", (*two, "slurm.cpus_per_task=3"), ""),
        ("1", (), ""),
    ):
        (folder / "cores").write_text(cores)
        assert submit(*given) == 0
        assert capsys.readouterr().err == told


def test_several_partitions_are_a_choice_of_slurms(folder, capsys):
    """One of them must have what is asked for."""
    given = ("slurm.partition='small,short'", "slurm.time_minutes=30")
    assert submit(*given, "slurm.nodes=2", "train.global_batch_size=16") == 0
    assert "\n#SBATCH --partition=small,short\n" in (folder / "given.sbatch").read_text()
    assert gpu_types("small,short") == ["a100"]
    capsys.readouterr()
    assert submit(*given, "slurm.nodes=5", "train.global_batch_size=160") == 2
    assert capsys.readouterr().err == "slurm.nodes=5 must be at most the 1 nodes of partition small; try 1\n"
    assert submit("slurm.partition='short,'") == 2
    start = "slurm.partition=short, must be a partition of this cluster, and '' is none; try main, short or small"
    assert capsys.readouterr().err == f"{start}\n"


def test_a_chain_of_which_slurm_takes_a_part_is_not_submitted(folder, capsys):
    """A site's limit on the jobs of a user is met by the third one, after two have been taken."""
    (folder / "most").write_text("2")
    assert submit("slurm.chain=5") == 2
    line = "slurm.chain=5: sbatch takes 2 of these jobs: QOSMaxSubmitJobPerUserLimit; try slurm.chain=2\n"
    assert capsys.readouterr() == ("", line)
    assert (folder / "cancelled").read_text() == "7 7\n"
    (folder / "queued").write_text("")
    (folder / "no-scancel").touch()
    assert submit("slurm.chain=5") == 2
    assert capsys.readouterr().err.endswith("; `scancel 7 7` ends those, then try slurm.chain=2\n")
    (folder / "queued").write_text("")
    assert submit("slurm.chain=2") == 0
