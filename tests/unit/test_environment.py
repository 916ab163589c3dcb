"""Wrong variables of torchrun and Slurm: each is named with its value, the rule and a remedy, at once."""

import os
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.config.dump import dump_config
from layout_runs import run_config, write_tokens
from parallel.processes.environment import WrongEnvironment, number
from parallel.processes.world import array_task, expand_hosts, rank_hosts, world_size_from_environment

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n1",
}
ARRAY = {
    "SLURM_ARRAY_TASK_ID": "4",
    "SLURM_ARRAY_TASK_MIN": "2",
    "SLURM_ARRAY_TASK_MAX": "6",
    "SLURM_ARRAY_TASK_STEP": "2",
    "SLURM_ARRAY_TASK_COUNT": "3",
}
NOT_NUMBERS = ("", "x", "-1", "1.0", "0x1", " 1", "1_0", "\u0663", "1e3", "9" * 30, "1\n2", "inf")
BEYOND = {"WORLD_SIZE": ("0",), "RANK": ("2", "7"), "LOCAL_RANK": ("2",), "MASTER_PORT": ("0", "65536")} | {
    "SLURM_STEP_NUM_TASKS": ("0",),
    "SLURM_PROCID": ("2",),
    "SLURM_LOCALID": ("2",),
    "SLURM_JOB_ID": ("0",),
}
OF_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
OF_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID")
ADDRESSES = ("", "n1 n2", "n1:29500", "http://n1", "n1/24", "n1\nn2", "n\u00f6de", "*")
WRONG = [
    *((TORCHRUN, {name: value}) for name in OF_TORCHRUN for value in (*NOT_NUMBERS, *BEYOND.get(name, ()))),
    *((TORCHRUN, {"TORCHELASTIC_MAX_RESTARTS": value}) for value in NOT_NUMBERS),
    *((TORCHRUN, {"MASTER_ADDR": value}) for value in ADDRESSES),
    *((TORCHRUN, {name: None}) for name in TORCHRUN if name not in ("LOCAL_WORLD_SIZE",)),
    *((STEP, {name: value}) for name in OF_SLURM for value in (*NOT_NUMBERS, *BEYOND.get(name, ()))),
    *((STEP, {"SLURM_RESTART_COUNT": value}) for value in NOT_NUMBERS),
    *((STEP, {"MASTER_PORT": value}) for value in NOT_NUMBERS),
    *((STEP, {"MASTER_ADDR": value}) for value in ADDRESSES),
    *((STEP, {name: None}) for name in ("SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")),
    *(({}, {name: value}) for name in ("SLURM_RESTART_COUNT", "SLURM_JOB_ID") for value in NOT_NUMBERS),
]
WRONG_ARRAYS = [
    *(
        {name: value}
        for name in ARRAY
        if name != "SLURM_ARRAY_TASK_MAX"
        for value in (*NOT_NUMBERS, *(("0", "3", "8") if name == "SLURM_ARRAY_TASK_ID" else ()))
        if (name, value) != ("SLURM_ARRAY_TASK_ID", "3")
    ),
    {"SLURM_ARRAY_TASK_MIN": None},
    {"SLURM_ARRAY_TASK_COUNT": None},
]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    path = folder / "run.yaml"
    path.write_text(dump_config(run_config(write_tokens(folder))).replace("run_dir: null", f"run_dir: {folder}/run"))
    return path


def use(monkeypatch, variables: dict[str, str], changes: dict[str, str | None]) -> None:
    """The environment of a rank or task, with mistakes."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))] + list(TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, **changes}.items():
        if value is not None:
            monkeypatch.setenv(name, value)


def line_of(problems: list[str], changes: dict[str, str | None]) -> str:
    """The only line, which names the variable and its value, and has a remedy."""
    ((name, value),) = changes.items()
    (line,) = problems
    assert line.startswith(f"{name} must " if value is None else f"{name}={value!a} must ")
    assert "; " in line and "\n" not in line
    return line


def refused(arguments: list[str], capfd) -> list[str]:
    """The lines with which the command refuses."""
    code = main(arguments)
    out, err = capfd.readouterr()
    assert (code, out) == (2, ""), err
    return err.splitlines()


def changed(variables: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**variables, **changes}.items() if value is not None}


def test_each_wrong_variable_of_a_rank_has_its_line():
    for variables, changes in WRONG:
        with pytest.raises(WrongEnvironment) as error:
            world_size_from_environment(changed(variables, changes))
        line_of(error.value.problems, changes)


def test_each_wrong_variable_of_an_array_has_its_line():
    for changes in WRONG_ARRAYS:
        with pytest.raises(WrongEnvironment) as error:
            array_task(changed(ARRAY, changes))
        line_of(error.value.problems, changes)


@pytest.mark.parametrize("command", ["train", "preflight"])
def test_commands_refuse_a_wrong_variable(config, monkeypatch, capfd, command):
    """One wrong value of each variable."""
    cases = {str([*variables, changes.keys()]): (variables, changes) for variables, changes in WRONG}
    for variables, changes in cases.values():
        with monkeypatch.context() as patch:
            use(patch, variables, changes)
            line_of(refused([command, str(config)], capfd), changes)
    assert not (config.parent / "run").exists()


def test_prepare_refuses_a_wrong_array(config, monkeypatch, capfd):
    changes = {"SLURM_ARRAY_TASK_ID": "x"}
    use(monkeypatch, ARRAY, changes)
    line_of(refused(["prepare", str(config)], capfd), changes)


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        (STEP, "give `srun --ntasks=3` instead, or put `env -u SLURM_PROCID` before the command for 3 of its own"),
        (TORCHRUN, "leave it out under torchrun"),
        (STEP | TORCHRUN, "leave it out under torchrun"),
    ],
)
def test_another_number_of_ranks_than_the_jobs_is_refused(config, monkeypatch, capfd, variables, remedy):
    """In an interactive step to leave it out was no remedy, since the step has one process."""
    use(monkeypatch, variables, {})
    (line,) = refused(["train", str(config), "--ranks", "3"], capfd)
    assert line.startswith("--ranks=3 must equal the job's 2 processes") and line.endswith(f"; {remedy}")


def test_size_alone_and_rank_alone_are_refused(config, monkeypatch, capfd):
    use(monkeypatch, {}, {"RANK": "3"})
    lines = refused(["train", str(config)], capfd)
    missing = ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    assert [line.partition(" must be set; ")[0] for line in lines] == missing
    use(monkeypatch, {}, {"WORLD_SIZE": "2"})
    assert main(["train", str(config)]) == 2
    assert capfd.readouterr().err.startswith(
        "RANK must be set (below WORLD_SIZE=2); start the ranks by torchrun or srun"
    )


def test_list_of_hosts_without_scontrol_is_refused(config, monkeypatch, capfd):
    monkeypatch.setenv("PATH", "/nowhere")
    changes = {"SLURM_STEP_NODELIST": "n[1-2]"}
    use(monkeypatch, STEP, changes)
    line = line_of(refused(["train", str(config)], capfd), changes)
    assert (
        "there is no scontrol here; put Slurm's commands on PATH (into the container too), or set MASTER_ADDR" in line
    )
    assert expand_hosts("n1.cluster") == ["n1.cluster"]


@pytest.mark.parametrize(
    ("script", "said"), [("echo no such host >&2; exit 1", "no such host"), ("exit 3", "exit code 3"), ("", "code 0")]
)
def test_scontrol_that_fails_is_told(tmp_path, monkeypatch, script, said):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WrongEnvironment, match=f"scontrol said: .*{said}; put Slurm's"):
        expand_hosts("n[1-2]")


def test_right_environments_are_read():
    assert world_size_from_environment({}) is None
    assert world_size_from_environment({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) is None  # an sbatch script
    assert world_size_from_environment(TORCHRUN) == 2
    assert world_size_from_environment(STEP) == 2
    assert world_size_from_environment(STEP | {"WORLD_SIZE": "8"}) == 2  # a script's own, which srun's replace
    for address in ("n1.cluster", "10.0.0.1", "::1", "fe80::1", "job_master-0"):
        assert world_size_from_environment(TORCHRUN | {"MASTER_ADDR": address}) == 2
    assert array_task({}) is None
    assert array_task(ARRAY) == (1, 3)
    assert rank_hosts({"SLURM_STEP_TASKS_PER_NODE": "1(x999999999)", "ROUNDTABLE_NODES": "n1"}) is None


def test_number_has_a_default_where_it_is_not_set():
    assert number("A", {}, default=3) == 3
    assert number("A", {"A": "007"}) == 7
    with pytest.raises(WrongEnvironment, match="A='2' must be a whole number from 3 to 4"):
        number("A", {"A": "2"}, least=3, most=4)
