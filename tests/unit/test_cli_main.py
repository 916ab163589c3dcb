"""The command line: exit codes, and what goes to stderr."""

import errno
import json
import os
import subprocess
import sys

import pytest

import launcher.commands.doctor
from data.errors import DataError
from launcher.cli import main
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.errors import UserError


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text("name: small\nmodel: {n_layers: 2}\n")
    return path


def run(capsys, *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, standard output and the lines of standard error of one command."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def test_config_prints_what_loads_again(capsys, config, tmp_path):
    code, output, errors = run(capsys, "config", config, "train.steps=5")
    assert (code, errors) == (0, [])
    assert "n_layers: 2 # default: 8" in output
    (tmp_path / "again.yaml").write_text(output)
    assert load_config(tmp_path / "again.yaml") == load_config(config, ["train.steps=5"])


def test_config_as_json(capsys, config):
    code, output, _ = run(capsys, "config", "--json", config, "train.steps=5")
    assert code == 0
    assert json.loads(output)["train"]["steps"] == 5


def test_a_refusal_is_its_lines_and_exit_code_2_and_nothing_created(capsys, config, tmp_path):
    code, output, errors = run(capsys, "config", config, "train.steps=0", "model.n_kv_heads=3", "--ranks", "3")
    assert (code, output) == (2, "")
    assert errors == [
        "train.steps=0 must be at least 1; try 1000",
        "train.global_batch_size=8 must be a multiple of dp=3 x train.micro_batch_size=1 = 3; try 6 or 9",
        "model.n_kv_heads=3 must divide model.n_heads=8; try 2 or 4",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


LAYOUTS = [
    ["parallel.pp=2", "parallel.tp=2"],
    ["parallel.cp=2", "parallel.zero=3"],
    ["parallel.ep=4", "parallel.tp=2", "model.family=mixtral", "model.moe.n_experts=4", "model.moe.top_k=2"],
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_trains_nothing_takes_the_config_of_any_layout(capsys, config, layout):
    """A cluster's run is looked at, and its data prepared, by one process on the login node."""
    small = ["model.vocab_size=300", "model.d_model=64", "data.seq_len=32", "data.sources=[{path: texts}]"]
    (config.parent / "texts").mkdir()
    for number in range(20):
        (config.parent / f"texts/{number}.txt").write_text(f"{number} seats are round the table.\n")
    code, _, errors = run(capsys, "config", config, *small, *layout)
    assert (code, errors) == (0, [])
    code, _, errors = run(capsys, "prepare", config, *small, *layout)
    assert code == 0 and "20 documents" in "".join(errors)
    code, _, errors = run(capsys, "config", config, *small, *layout, "--ranks", "1")
    assert code == 2 and "the number of processes=1" in errors[0]


USAGE = [
    (["plot"], "Missing argument 'RUN'; see roundtable plot --help"),
    (["data", "show"], "Missing argument 'RUN'; see roundtable data show --help"),
    (["plto"], "No such command 'plto'. Did you mean 'plot'?; see roundtable --help"),
    (["confg"], "No such command 'confg'"),
    (["config"], "Missing argument 'CONFIG'"),
    (["config", "a.yaml", "--bogus"], "No such option: --bogus"),
    (["config", "a.yaml", "--ranks", "many"], "Invalid value 'many' for '--ranks': "),
    (["config", "a.yaml", "--ranks=0"], "Invalid value '0' for '--ranks': "),
    (["config", "a.yaml", "--ranks", "2", "--ranks", "-1"], "Invalid value '-1' for '--ranks': "),
    (["prove", "a.yaml", "--steps", "33"], "Invalid value '33' for '--steps': Input should be less than"),
    (["config", "none.yaml"], "none.yaml: no such file"),
    (["config", "none.yaml", "steps"], "none.yaml: no such file"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "start"), USAGE, ids=[" ".join(arguments) for arguments, _ in USAGE])
def test_a_wrong_command_line_is_one_line_and_exit_code_2(capsys, config, arguments, start):
    code, output, errors = run(capsys, *arguments)
    assert (code, output) == (2, "")
    assert errors[0].startswith(start)
    assert len(errors) == (2 if "steps" in arguments else 1)


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (
            UserError(["a=1 must be 2; try 2", "b=1 must be 3; try 3"]),
            2,
            ["a=1 must be 2; try 2", "b=1 must be 3; try 3"],
        ),
        (DataError("x.idx: torn; run prepare"), 2, ["x.idx: torn; run prepare"]),
        (KeyboardInterrupt(), 130, []),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a/x"),
            1,
            ["runs/a/x: No space left on device; free some space, or choose another disk"],
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "out"),
            1,
            ["out: Read-only file system; give this user the right to it, or choose another place"],
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            1,
            ["a file or stream: Too many open files; raise the limit (ulimit -n), or close other programs"],
        ),
        (
            OSError(errno.EFBIG, "File too large", "out/model.safetensors"),
            1,
            [
                "out/model.safetensors: File too large; "
                "raise the limit (ulimit -f), or choose a disk whose file system takes larger files"
            ],
        ),
    ],
)
def test_errors_of_a_command_become_exit_codes(capsys, monkeypatch, error, code, lines):
    def fail(*, as_json):
        raise error

    monkeypatch.setattr(launcher.commands.doctor, "print_report", fail)
    assert run(capsys, "doctor") == (code, "", lines)


def test_an_internal_error_keeps_its_traceback(monkeypatch):
    def fail(*, as_json):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(launcher.commands.doctor, "print_report", fail)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [([], 0), (["--help"], 0), (["--version"], 0), (["config", "none.yaml"], 2), (["config", "config.yaml"], 0)],
)
def test_quick_commands_import_no_heavy_library(config, arguments, code):
    script = (
        "import sys; from launcher.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'deepspeed', 'datasets', 'wandb'} & set(sys.modules); "
        "assert not heavy, heavy; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (1 if code else 0)


@pytest.mark.parametrize(
    "arguments", [["train", "config.yaml"], ["generate", "run", "--prompt", "a"], ["runs"], ["doctor"]]
)
def test_a_current_folder_that_was_removed_is_told_before_libraries_meet_it(tmp_path, arguments):
    (tmp_path / "gone").mkdir()
    script = (
        "import os, sys; from launcher.cli import main; os.chdir('gone'); os.rmdir('../gone'); "
        "code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    told = "the current folder was removed; cd into one that is there\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


@pytest.mark.parametrize(("closed", "code"), [("<&-", 0), (">&-", 0), ("<&- >&- 2>&-", 0), ("2>&-", 2)])
def test_closed_standard_streams_take_no_file_s_place(config, closed, code):
    """What is opened later must not get their numbers, into which libraries print."""
    script = (
        "import os, sys; from launcher.cli import main; code = main(sys.argv[1:]); "
        "assert os.open(os.devnull, os.O_RDONLY) > 2; print('x'); print('y', file=sys.stderr); sys.exit(code)"
    )
    name = "none.yaml" if code else config.name
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", script, "config", name]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == code


def test_an_interrupt_waits_for_the_end_of_an_import(tmp_path):
    """Where libraries in C import each other it would be dropped, and what was imported stay half made."""
    (tmp_path / "dropping.py").write_text(
        "import os, signal\n"
        "whole = False\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    whole = True\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
    )
    script = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from launcher.cli import main\n"
        "main()\n"
        "try:\n"
        "    import dropping\n"
        "    time.sleep(50)\n"
        "except KeyboardInterrupt:\n"
        "    print(dropping.whole)\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", script, "--version"]
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.stdout.splitlines()[-1] == "True", done.stderr


@pytest.mark.parametrize("ending", ["return 130", "raise KeyboardInterrupt"])
def test_a_second_interrupt_on_the_way_out_leaves_no_traceback(ending):
    """`train` says what is saved and returns the code itself; other commands are ended by the exception."""
    script = (
        "import atexit, os, signal, sys\n"
        "import launcher.commands.doctor\n"
        f"def interrupted(*, as_json):\n    {ending}\n"
        "launcher.commands.doctor.print_report = interrupted\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "from launcher.cli import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, "doctor"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_every_command_says_what_it_does(capsys):
    _, output, _ = run(capsys, "--help")
    assert "config" in output
    assert "doctor" in output
    code, output, _ = run(capsys, "config", "--help")
    assert code == 0
    assert "KEY=VALUE" in output


def test_the_defaults_are_a_config():
    assert RunConfig().run_path.as_posix() == "runs/run"
