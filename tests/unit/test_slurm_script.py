"""The job script: its text for three clusters, and that each key of `slurm:` changes it."""

import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.config.schema import leaf_keys
from launcher.config.tree import RunConfig
from launcher.slurm import queue
from launcher.slurm.config import SlurmConfig
from launcher.slurm.profile import FOLDER, job_script
from launcher.slurm.queue import Partition, gpus_of, minutes_of, partitions
from launcher.slurm.rules import FURTHER_OPTIONS
from launcher.slurm.script import Array, exports, render
from parallel.processes.world import expand_counts, rank_hosts

BATCH = "train.global_batch_size=96"
CONFIG = "name: small\nmodel: {n_layers: 2}\ndata: {sources: [{path: none.txt}]}\n"

GENERIC = """\
#SBATCH --job-name=small
#SBATCH --comment=roundtable:FOLDER/runs/small
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=1-00:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=runs/small/logs/job-%j.log
#SBATCH --requeue
JOB=$SLURM_JOB_ID
RUN_DIR=runs/small
PYTHON=python3
REQUEUE=yes
RESTARTS=3
PREFLIGHT=yes
SPARES=0
SRUN_OPTIONS=()
set -- "$RUN_DIR/slurm/config.yaml"
"""
INFINIBAND = """\
#SBATCH --job-name=small
#SBATCH --comment=roundtable:FOLDER/runs/small
#SBATCH --partition=gpu
#SBATCH --account=my-project
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=runs/small/logs/job-%j.log
#SBATCH --requeue
declare -F module >/dev/null || . /etc/profile  # a shell other than bash hands no `module` on
module load cuda/12.8 nccl/2.27 || { echo 'module load failed; the lines above say why' >&2; exit 1; }
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
export TRITON_CACHE_DIR=/local_scratch/roundtable/triton
export TORCHINDUCTOR_CACHE_DIR=/local_scratch/roundtable/inductor
export NCCL_IB_HCA=mlx5
JOB=$SLURM_JOB_ID
RUN_DIR=runs/small
PYTHON=python3
REQUEUE=yes
RESTARTS=3
PREFLIGHT=yes
SPARES=0
SRUN_OPTIONS=()
set -- "$RUN_DIR/slurm/config.yaml"
"""
CONTAINER = """\
#SBATCH --job-name=small
#SBATCH --comment=roundtable:FOLDER/runs/small
#SBATCH --partition=batch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=0-04:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --dependency=singleton
#SBATCH --open-mode=append
#SBATCH --output=runs/small/logs/job-%j.log
#SBATCH --no-requeue
export NCCL_SOCKET_IFNAME='^lo,docker0'
JOB=$SLURM_JOB_ID
RUN_DIR=runs/small
PYTHON=python3
REQUEUE=no
RESTARTS=3
PREFLIGHT=yes
SPARES=0
SRUN_OPTIONS=(--container-image=registry.example.org/roundtable:1.0 --container-mounts="$PWD:$PWD" --container-workdir="$PWD")
set -- "$RUN_DIR/slurm/config.yaml"
"""  # noqa: E501 -- one line of the script
SETTINGS = {"generic": GENERIC, "infiniband": INFINIBAND, "container": CONTAINER}
MARKS = ("# --- settings\n", "# --- end of settings\n")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a config, nothing prepared, on a machine without Slurm."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("profile", SETTINGS)
def test_dry_run_prints_this_script_for_the_cluster(folder, capsys, profile):
    arguments = ["submit", "config.yaml", BATCH, "slurm.python=python3", "--nodes", "2", "--cluster", profile]
    assert main([*arguments, "--dry-run"]) == 0
    told = capsys.readouterr()
    head, settings, body = split(told.out)
    assert settings == SETTINGS[profile].replace("FOLDER", str(folder))
    assert head == "\n".join(job_script("train").splitlines()[:2]) + "\n"
    assert body == split(job_script("train"))[2], "below the settings it is the script that people edit"
    assert [line.partition(": ")[0] for line in told.err.splitlines()] == ["warning"] * 2
    assert "data.sources[0].path='none.txt' does not exist" in told.err
    assert "sbatch must be on the PATH" in told.err
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


def split(script: str) -> list[str]:
    head, _, rest = script.partition(MARKS[0])
    return [head, *rest.split(MARKS[1])]


def test_the_profiles_are_those_of_the_test():
    assert sorted(path.stem for path in (FOLDER / "clusters").glob("*.yaml")) == sorted(SETTINGS)


def test_without_a_dry_run_the_same_is_refused(folder, capsys):
    assert main(["submit", "config.yaml", BATCH, "--nodes", "2"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[0].startswith("data.sources[0].path='none.txt' does not exist")
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--nodes", "3"], "train.global_batch_size=96 must be a multiple of dp=24"),
        (["--cluster", "none"], "--cluster=none must be one of container, generic, infiniband"),
        (["slurm.nods=2"], "slurm.nods=2 is not a known key; did you mean slurm.nodes?"),
        (["slurm.time_minutes=5"], "slurm.time_minutes=5 must be longer than slurm.notice_seconds=300"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_config_is_refused_by_a_dry_run_too(folder, capsys, arguments, start):
    batch = "train.global_batch_size=96" if "3" in arguments else "train.global_batch_size=64"
    micro = ["train.micro_batch_size=3"] if "3" in arguments else []
    assert main(["submit", "config.yaml", batch, *micro, *arguments, "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(start)


def test_a_profile_lies_below_the_config_and_that_below_options(folder, capsys):
    (folder / "mine.yaml").write_text("partition: theirs\nnodes: 7\nqos: low\n")
    (folder / "config.yaml").write_text(CONFIG + "slurm: {nodes: 5, qos: high}\n")
    assert main(["submit", "config.yaml", BATCH, "--cluster", "mine.yaml", "--nodes", "2", "--dry-run"]) == 0
    settings = split(capsys.readouterr().out)[1]
    for line in ("partition=theirs", "nodes=2", "qos=high"):
        assert f"#SBATCH --{line}\n" in settings


CHANGES = {
    "partition": "p",
    "account": "a",
    "qos": "q",
    "constraint": "c",
    "exclude": "n1",
    "nodes": 2,
    "gpus_per_node": 4,
    "tasks_per_node": 4,
    "cpus_per_task": 4,
    "memory": "1G",
    "time_minutes": 60,
    "notice_seconds": 60,
    "requeue": False,
    "chain": 2,
    "restarts": 1,
    "preflight": False,
    "spare_nodes": 1,
    "python": "/python",
    "modules": ("cuda",),
    "container": "image",
    "network_interface": "ib0",
    "scratch": "/scratch",
    "environment": ("A=b",),
    "options": ("exclusive",),
    "container_mounts": ("/data",),
}


def test_each_key_changes_the_script():
    keys = [key.removeprefix("slurm.") for key in leaf_keys(RunConfig) if key.startswith("slurm.")]
    assert sorted([*CHANGES, "gpu"]) == sorted(keys)  # gpu is what submit plans for: tests/unit/test_submit_fit.py

    def script(**changes) -> str:
        config = RunConfig(slurm=SlurmConfig(**{"container": "one", **changes}))
        return render(job_script("train"), config, "python")

    texts = [script(**{key: value}) for key, value in CHANGES.items()]
    assert len({*texts, script()}) == len(CHANGES) + 1


@pytest.mark.parametrize(
    ("scratch", "expected"),
    [
        ("/tmp", "/tmp"),
        ("$FAST_DISK", "/fast disk"),
        ("/a b/${FAST_DISK}x/$(date)/`date`'\"", "/a b//fast diskx/$(date)/`date`'\""),
        ("$NOT_THERE/x", None),
    ],
)
def test_scratch_holds_variables_of_the_job_and_nothing_else_is_run(scratch, expected):
    names = dict(exports(SlurmConfig(scratch=scratch)))
    line = f"printf %s {names['TRITON_CACHE_DIR']}"
    done = subprocess.run(
        ["bash", "-euc", line], env={"FAST_DISK": "/fast disk"}, capture_output=True, text=True, check=False
    )
    if expected is None:
        assert (done.returncode != 0, "NOT_THERE: is not set on the node" in done.stderr) == (True, True)
    else:
        assert done.stdout == f"{expected}/roundtable/triton"


def test_a_container_sees_what_lies_outside_the_folder(tmp_path, monkeypatch):
    """Else checkpoints are written within the container, which is removed when the step ends."""
    for name in ("here", "runs", "big disk", "tokens"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = RunConfig(slurm=SlurmConfig(container="image"), run_dir=f"{tmp_path}/runs/mine")
    checkpoint = dataclasses.replace(config.checkpoint, dir=f"file://{tmp_path}/big disk/mine")
    data = dataclasses.replace(config.data, token_dir="../tokens")
    config = dataclasses.replace(config, checkpoint=checkpoint, data=data)
    mounts = f"\"$PWD:$PWD\",{tmp_path}/runs:{tmp_path}/runs,'{tmp_path}/big disk:{tmp_path}/big disk',"
    mounts += f"{tmp_path}/tokens:{tmp_path}/tokens"
    assert f" --container-mounts={mounts} " in render(job_script("train"), config, "python")
    remote = dataclasses.replace(config, checkpoint=dataclasses.replace(checkpoint, dir="s3://bucket/mine"))
    assert "big disk" not in render(job_script("train"), remote, "python")


def test_a_container_sees_the_further_folders_of_its_cluster():
    mounts = ("/scratch", "/models:/hub:ro", "/big disk:/data", "/a$(b)'c:/d")
    script = render(job_script("train"), RunConfig(slurm=SlurmConfig(container="i", container_mounts=mounts)), "python")
    (options,) = re.findall(r"^SRUN_OPTIONS=.*", script, re.MULTILINE)
    said = f'{options}; printf "%s\\n" "${{SRUN_OPTIONS[@]}}"'
    done = subprocess.run(
        ["bash", "-c", said], capture_output=True, text=True, check=True, env={"PWD": "/here"}, cwd="/"
    )
    (given,) = [line for line in done.stdout.splitlines() if line.startswith("--container-mounts=")]
    expected = ["/:/", "/scratch:/scratch", *mounts[1:]]
    assert given == f"--container-mounts={','.join(expected)}"


def test_the_page_names_each_further_option():
    page = (Path(__file__).parents[2] / "docs/slurm.md").read_text()
    taken = page.partition("These are taken,")[2].partition("Others would")[0]
    assert re.findall(r"`([a-z-]+)`", taken) == [*FURTHER_OPTIONS]


def test_further_options_are_lines_of_the_script():
    options = ("reservation=week", "exclusive", "switches=2@01:00:00", "gres=nvme:1,tmp:2")
    script = render(job_script("train"), RunConfig(slurm=SlurmConfig(options=options)), "python")
    assert "".join(f"#SBATCH --{each}\n" for each in options) in script


@pytest.mark.parametrize(
    ("shell", "started"),
    [("module() { echo $2 >> loaded; }", True), ("module() { return 1; }", False), ("", False)],
    ids=["loads", "fails", "unknown"],
)
def test_a_job_without_its_modules_does_not_begin(tmp_path, shell, started):
    """Its ranks would have met another CUDA or NCCL, or none."""
    (tmp_path / "srun").write_text("#!/bin/bash\n: > started\n")
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho n1\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    settings = SlurmConfig(modules=("cuda/12.8",), preflight=False)
    script = render(job_script("train"), RunConfig(run_dir="run", slurm=settings), "python")
    text = f"{shell}\n{script.replace('/etc/profile', '/dev/null')}"
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "run", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS_PER_NODE": "1"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **job}
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, timeout=60, capture_output=True)
    assert (done.returncode == 0, (tmp_path / "started").exists()) == (started, started)
    assert (b"module load failed" in done.stderr) == (not started)


@pytest.mark.parametrize(("array", "log"), [(None, "%j"), (Array(3, None), "%A_%a")])
def test_the_scripts_are_bash(array, log):
    for path in sorted(FOLDER.glob("*.sbatch")):
        subprocess.run(["bash", "-n", path], check=True)
    odd = RunConfig(name="it's", slurm=SlurmConfig(environment=("A=b c'd",), python="/a b/python"))
    text = render(job_script("train"), dataclasses.replace(odd, run_dir="a dir/run"), "python", array)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert f'#SBATCH --output="a dir/run/logs/job-{log}.log"' in text


@pytest.mark.parametrize("name", ["train", "preflight"])
def test_the_ranks_get_what_the_script_sets_where_the_shells_variables_stay_behind(tmp_path, name):
    """Slurm sets SLURM_EXPORT_ENV after `sbatch --export=NONE`: srun takes it as its own --export, by default ALL."""
    verdict = "[[ $* == *preflight* ]] && : > run/preflight/job-1-start-0-try-1.bad"
    told = {"srun": f'env >> seen; echo " $*" >> given; {verdict}; exit 0'}
    for program, text in {**told, "scontrol": "[[ $1$2 == showhostnames ]] && echo n1", "sleep": "true"}.items():
        (tmp_path / program).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / program).chmod(0o755)
    (tmp_path / "run" / "preflight").mkdir(parents=True)
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "run", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS_PER_NODE": "1"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **job, "SLURM_EXPORT_ENV": "NONE"}
    text = job_script(name).replace("RUN_DIR=runs/", "RUN_DIR=")
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == 0
    seen = (tmp_path / "seen").read_text().splitlines()
    assert [line for line in seen if line.startswith("SLURM_EXPORT_ENV")] == []
    given = (tmp_path / "given").read_text().splitlines()
    # By default Slurm gives a node's tasks cores of its sockets in turn; its GPUs lie first on one, then on the other.
    assert all(" --distribution=block:block " in line for line in given)
    # The site's WaitTime, after which srun ends all ranks once the first has ended, would cut a preflight short.
    assert all(" --wait=0 " in line for line in given)
    assert [line for line in seen if line.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING")] == []  # torch's own
    assert sum(line.startswith("ROUNDTABLE_TOKEN=") for line in seen) == {"train": 2, "preflight": 1}[name]


@pytest.mark.parametrize(
    ("edit", "n_found"),
    [
        (lambda text: text.replace("# --- settings\n", "# settings\n"), 0),
        (lambda text: text.replace("# --- end of settings\n", ""), 0),
        (lambda text: text + f"{MARKS[0]}\n{MARKS[1]}\n", 2),
        (lambda text: "", 0),
    ],
)
def test_an_edited_template_without_its_marks_is_refused(folder, capsys, monkeypatch, edit, n_found):
    text = edit(job_script("train"))
    monkeypatch.setattr("launcher.slurm.submit.job_script", lambda name: text)
    assert main(["submit", "config.yaml", BATCH, "--dry-run"]) == 2
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith("slurm/train.sbatch must have its settings once") and f"has them {n_found} times" in line
    assert told.out == "" and [path.name for path in folder.iterdir()] == ["config.yaml"]


def test_a_template_without_its_notes_is_taken(folder):
    text = re.sub(r"#\n# By hand.*?(?=# --- settings)", "", job_script("train"), flags=re.DOTALL)
    config = RunConfig()
    assert render(text, config, "python") == render(job_script("train"), config, "python")


def test_a_partition_is_read_whatever_slurm_prints_of_its_processors(monkeypatch):
    """Of 1,024 a node it says 1K, which was a traceback of every submit."""
    printed = {"%P": "main*", "%D": "2", "%G": "gpu:8", "%c": "1K", "%l": "1:00:00"}
    monkeypatch.setattr(queue, "ask", lambda *command: re.sub(r"%.", lambda each: printed[each[0]], command[-1]))
    assert partitions() == ({"main": Partition("main", 2, 8, 60)}, "main")


def test_what_slurm_prints_is_read():
    assert [gpus_of(text) for text in ("gpu:8", "gpu:h100:4(S:0-1),shard:2", "gpu:a:2,gpu:b:2", "(null)")] == [
        8,
        4,
        4,
        0,
    ]
    limits = {"infinite": None, "30:00": 30, "1:00:00": 60, "2-00:00:00": 2880, "n/a": None}
    assert {text: minutes_of(text) for text in limits} == limits
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


def test_the_nodes_of_the_ranks_are_known_without_scontrol(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    step = {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1,3]", "WORLD_SIZE": "4"}
    assert rank_hosts(step) is None
    assert rank_hosts(step | {"ROUNDTABLE_NODES": "n1,n3"}) == ["n1", "n1", "n3", "n3"]
    assert rank_hosts(step | {"ROUNDTABLE_NODES": "n1,n2,n3"}) is None, "another step's"


SRUN = """\
#!/bin/bash
# Trains as START of the job: saves where the first signal comes, and is ended by a second one.
trap 'echo heard >>told; trap - USR1; sleep 1; echo step-00000007 >run/.newest_checkpoint; exit 75' USR1
echo start >>told
START
"""


@pytest.fixture
def job(tmp_path) -> Callable[..., subprocess.Popen]:
    """Starts the job script as Slurm would, with what its ranks do; nothing of Slurm's is real."""
    settings = {"RUN_DIR": "run", "REQUEUE": "no", "PREFLIGHT": "no", "RESTARTS": "1"}
    text = re.sub(rf"(?m)^({'|'.join(settings)})=.*$", lambda m: f"{m[1]}={settings[m[1]]}", job_script("train"))
    (tmp_path / "train.sbatch").write_text(re.sub(r"sleep (5|60)\b", "true", text))
    for name, content in {"scontrol": "[[ $1 == show && $2 == hostnames ]] && echo n1", "scancel": "true"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{content}\n")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS_PER_NODE": "1"}

    def start(ranks: str) -> subprocess.Popen:
        (tmp_path / "srun").write_text(SRUN.replace("START", ranks))
        for name in ("srun", "scontrol", "scancel"):
            (tmp_path / name).chmod(0o755)
        command = ["bash", "train.sbatch"]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    return start


def when_told(path: Path, word: str) -> None:
    """Returns once the ranks have said the word."""
    deadline = time.monotonic() + 30
    while not path.exists() or word not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("first", "second", "end"),
    [
        (signal.SIGUSR2, signal.SIGUSR2, "stopped on request"),
        (signal.SIGUSR1, signal.SIGUSR2, "stopped on request"),
        (signal.SIGUSR2, signal.SIGUSR1, "stopped on request"),
        (signal.SIGUSR1, signal.SIGUSR1, "stopped"),
    ],
)
def test_a_second_request_does_not_end_the_save(tmp_path, job, first, second, end):
    """`cancel --save` twice, or beside the notice of the time limit: ranks take a second signal as the end."""
    script = job("for _ in {1..300}; do sleep 0.1; done")
    when_told(tmp_path / "told", "start")
    script.send_signal(first)
    when_told(tmp_path / "told", "heard")
    script.send_signal(second)
    output, _ = script.communicate(timeout=60)
    assert script.returncode == 75
    assert f": {end}, at step-00000007\n" in output


def test_failures_in_a_row_are_counted_wherever_checkpoints_lie(tmp_path, job):
    """With RESTARTS=1: two fail, the second after a new checkpoint; then two without one."""
    script = job("n=$(grep -c start told); ((n == 2)) && echo step-00000002 >run/.newest_checkpoint; exit 1")
    output, _ = script.communicate(timeout=60)
    failures = re.findall(r"failed with code 1, (\d) in a row", output)
    assert (script.returncode, failures) == (1, ["1", "1", "2"])
