"""A run directory whose parts are of the wrong kind or hold the wrong thing: each command that reads one names it."""

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from command_runs import ENVIRONMENT
from forked_command import run_forked
from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.tree import MetricsConfig, WandbConfig
from launcher.training.run_parts import MOVE_AWAY, PARTS, Part
from layout_runs import run_config, write_tokens

pytestmark = pytest.mark.xdist_group("damaged run")  # what its tests share takes long to make

CONTENTS = {
    "config.yaml": [b"\x89PNG\r\n\0", b"[1, 2]", b"a: [", b"model: {layers: 3}\n"],
    "metrics.jsonl": [
        b"\x89PNG\r\n\0\x00\nmore\nlines\n",
        b'{"name": "not ours"}\n{"step": 1, "loss": 2.0}\n',
        b'{"step": 1, "loss": "high"}\n{"step": 2, "loss": 2.0}\n',
        b'{"step": 1, "loss": 2.0}\n{"step": 3, "lo\n{"step": 3, "loss": 1.0}\n',
        b'{"step": 2, "loss": 2.0}\n{"step": 1, "loss": 2.0}\n',
        b'{"step": 2, "loss": 2.0}\n{"step": 2, "loss": 2.0}\n',
        b"[" * 100_000 + b'\n{"step": 1, "loss": 2.0}\n',
        b'{"step": 1' + b"0" * 5000 + b', "loss": 2.0}\n{"step": 2, "loss": 2.0}\n',
    ],
    "ledger.jsonl": [b"\x89PNG\r\n\0\x00\nmore\n", b'{"step": 2}\n{"step": 1}\n'],
    ".fence": [b"\x89PNG", b"many\n", b"1" + b"0" * 30, b"-1\n", b"1.0", b"1\n2\n"],
    ".lock": [b"\x89PNG", b"[1]", b"{" * 50_000, b'{"host"'],
    ".started_in": [b"\x89PNG", b"", b"relative/folder\n"],
    "wandb/run_id": [b"\x89PNG", b"../../etc\n"],
    "branched_from.json": [b"\x89PNG", b"[1]", b'{"run": 1, "step": 2}', b"[" * 50_000],
    "token_files.json": [b"\x89PNG", b"[1]", b'{"data.sources[0]": 3}', b"[" * 50_000],
    "remote_tokens.json": [b"\x89PNG", b"[1]", b'{"s3://a/b.bin": 3}', b'{"s3://a/b.bin": {"size": 3}}'],
    "slurm/runs.txt": [b"\x89PNG\xff", b"../../etc\n"],
}
EVERYTHING = tuple(part.name for part in PARTS)
OF_A_CHECKPOINT = ("config.yaml", "checkpoints", ".started_in")
COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {  # the arguments, and the parts that are read
    "train": (["train", "{config}", "--ranks", "1"], EVERYTHING),
    "submit": (["submit", "{config}", "slurm.gpus_per_node=0"], EVERYTHING),
    "status": (["status", "{run}"], ("config.yaml", "metrics.jsonl", "checkpoints", "logs", "slurm")),
    "logs": (["logs", "{run}"], ("logs", "slurm")),
    "eval": (["eval", "{run}"], OF_A_CHECKPOINT),
    "export": (["export", "{run}", "{out}"], OF_A_CHECKPOINT),
    "generate": (["generate", "{run}", "--prompt", "a"], OF_A_CHECKPOINT),
    "show": (["checkpoint", "show", "{run}"], ("config.yaml", "checkpoints", "branched_from.json")),
    "verify": (["checkpoint", "verify", "{run}"], ("config.yaml", "checkpoints")),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder with a finished run, its config and its tokens, all paths relative."""
    folder = tmp_path_factory.mktemp("project")
    write_tokens(folder)
    config = run_config("tokens", steps=2)
    config = dataclasses.replace(
        config,
        name="small",
        data=dataclasses.replace(config.data, heldout_path="tokens"),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )
    (folder / "small.yaml").write_text(dump_config(config))
    with contextlib.chdir(folder):
        assert main(["train", "small.yaml", "--ranks", "1"]) == 0
    run = folder / "runs/small"
    for name in ("logs", "slurm", "wandb", "preflight"):
        (run / name).mkdir(exist_ok=True)
    (run / "logs/rank-0.log").write_text("a line\n")
    return folder


@pytest.fixture
def run(project, tmp_path, monkeypatch) -> Path:
    """The run's directory, in a copy of the project; Slurm is here, and quiet."""
    shutil.copytree(project, tmp_path / "project", symlinks=True)
    (tmp_path / "project/runs/small/.started_in").write_text(f"{tmp_path}/project\n")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr("launcher.slurm.checks.check_cluster", lambda *_, **__: [])
    monkeypatch.setattr("launcher.slurm.follow.require", lambda *_: None)
    monkeypatch.setattr("launcher.slurm.follow.live_jobs", lambda *_: [])
    return tmp_path / "project/runs/small"


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """What puts another thing in a part's place."""

    def do(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path)

    return do


def huge(path: Path) -> None:
    """A file of 10 GB that takes no room."""
    path.touch()
    os.truncate(path, 10**10)


KINDS: dict[str, Callable[[Path], None]] = {
    "a folder": replace_by(Path.mkdir),
    "a file": replace_by(Path.touch),
    "a loop": replace_by(lambda path: path.symlink_to(path.name)),
    "a dangling link": replace_by(lambda path: path.symlink_to("gone")),
    "a pipe": replace_by(os.mkfifo),
    "a device": replace_by(lambda path: path.symlink_to("/dev/zero")),
    "too long": replace_by(huge),
}


def hits(damage: str, part: Part) -> bool:
    """Whether the damage makes the part wrong."""
    if damage == "a dangling link":
        return not part.may_dangle
    if damage == "too long":
        return part.max_bytes is not None
    return damage != f"a {part.kind}"


def path_of(run: Path, part: Part) -> Path:
    return run / part.name.replace("rank-*", "rank-0.txt").replace("job-*", "job-1")


def is_read(part: Part, names: tuple[str, ...]) -> bool:
    return any(part.name == name or part.name.startswith(f"{name}/") for name in names)


def told(command: str, run: Path, capsys) -> tuple[int, str, list[str]]:
    """What a command answers: exit code, standard output, lines of standard error."""
    words = {"config": "small.yaml", "run": Path(os.path.relpath(run)), "out": "out"}
    capsys.readouterr()
    code = main([argument.format(**words) for argument in COMMANDS[command][0]])
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in [folder, *folder.rglob("*")]}


def assert_names(command: str, run: Path, paths: list[Path], capsys) -> None:
    """A line for each path, with the rule and the remedy; nothing is changed."""
    project = run.parents[1]
    before = snapshot(project)
    code, output, errors = told(command, run, capsys)
    assert (code, output, len(errors)) == (2, "", len(paths)), (paths, output, errors)
    for line, path in zip(errors, paths, strict=True):
        assert os.path.relpath(path) in line and "; " in line
    assert snapshot(project) == before


def rounds(command: str, wrong: list[Part]) -> list[list[Part]]:
    """The parts that are damaged at the same time, to save time: what is looked at together is told together."""
    alone = [
        part for part in wrong if COMMANDS[command][1] != EVERYTHING or part.name in ("config.yaml", "checkpoints")
    ]
    return [[part] for part in alone] + [[part for part in wrong if part not in alone]]


@pytest.mark.parametrize("damage", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_part_of_the_wrong_kind_is_named(run, capsys, command, damage):
    wrong = [part for part in PARTS if hits(damage, part) and is_read(part, COMMANDS[command][1])]
    above = {path_of(run, part) for part in wrong if part.kind == "folder"}  # a part below is not looked at
    wrong = [part for part in wrong if path_of(run, part).parent not in above]
    for parts in filter(None, rounds(command, wrong)):
        paths, kept = [path_of(run, part) for part in parts], run.parent / "part"
        shutil.copytree(run, kept, symlinks=True)
        for path in paths:
            KINDS[damage](path)
        assert_names(command, run, paths, capsys)
        shutil.rmtree(run)
        kept.rename(run)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_part_of_the_wrong_content_is_named(run, capsys, command):
    read = [part for part in PARTS if part.name in CONTENTS and is_read(part, COMMANDS[command][1])]
    for number in range(max(len(contents) for contents in CONTENTS.values())):
        wrong = [part for part in read if number < len(CONTENTS[part.name])]
        for parts in filter(None, rounds(command, wrong)):
            kept = {run / part.name: (run / part.name).read_bytes() for part in parts if (run / part.name).exists()}
            for part in parts:
                (run / part.name).write_bytes(CONTENTS[part.name][number])
            assert_names(command, run, [run / part.name for part in parts], capsys)
            for part in parts:
                (run / part.name).unlink()
            for path, content in kept.items():
                path.write_bytes(content)


@pytest.mark.parametrize("command", ["train", "submit", "eval", "export", "generate"])
def test_a_config_that_is_not_the_checkpoint_s_is_named(run, capsys, command):
    config = load_config(run / "config.yaml")
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=64))
    (run / "config.yaml").write_text(dump_config(other))
    assert_names(command, run, [run / "config.yaml"], capsys)


@pytest.mark.parametrize("command", ["train", "submit"])
def test_a_checkpoint_that_is_another_run_s_is_named(run, capsys, command):
    """The config beside it is gone, or was replaced together with the one that the user gives."""
    (copy,) = (run / "checkpoints").glob("step-*/config.yaml")
    (run / "config.yaml").unlink()
    copy.write_text(copy.read_text().replace("seed: 0", "seed: 1"))
    assert_names(command, run, [copy], capsys)


def test_commands_that_do_not_read_a_damaged_part_do_their_work(run, capsys):
    for part in PARTS:
        if (
            not is_read(part, (*OF_A_CHECKPOINT, "branched_from.json"))
            and "*" not in part.name
            and "/" not in part.name
        ):
            KINDS["a pipe"](path_of(run, part))
    for command in ("eval", "show", "verify"):
        code, output, errors = told(command, run, capsys)
        assert (code, bool(output)) == (0, True), errors


@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_part_without_rights_is_named(run, mode):
    """Root may do anything, so another user asks: of parts that it may not read, or may only read."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    script = (
        "import os, sys; from pathlib import Path; from launcher.errors import UserError\n"
        "from launcher.training.run_parts import check_parts; os.setgid(65534); os.setuid(65534)\n"
        "try: check_parts(Path(sys.argv[1]), 'metrics.jsonl', 'logs', writing=sys.argv[2] == 'write')\n"
        "except UserError as error: print(error)"
    )
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o755)
        theirs = Path(shutil.copytree(run, f"{folder}/run"))
        (theirs / "logs/rank-0.log").unlink()
        for part in (theirs / "metrics.jsonl", theirs / "logs"):
            part.chmod({"read": 0o700, "write": 0o755}[mode])
        command = [sys.executable, "-c", script, theirs, mode]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    rights = {"read": "read", "write": "read and written"}[mode]
    assert [line.split(", and is not; ")[0] for line in done.stdout.splitlines()] == [
        f"{theirs}/metrics.jsonl must be a file that can be {rights} by this user",
        f"{theirs}/logs must be a folder that can be {rights} by this user",
    ], done.stderr


@pytest.mark.parametrize("command", ["eval", "export", "generate", "show", "verify", "status", "logs"])
def test_a_run_is_read_from_any_folder(run, capsys, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    code, output, errors = told(command, run, capsys)
    assert code == (2 if command == "generate" else 0), errors  # it has no tokenizer, and says so
    assert ("holds no tokenizer" in errors[0]) if command == "generate" else output


def test_a_moved_run_whose_data_is_gone_says_where_it_was_looked_for(run, capsys, monkeypatch, tmp_path):
    shutil.move(run, tmp_path / "archive")
    monkeypatch.chdir(tmp_path)
    assert told("eval", tmp_path / "archive", capsys)[0] == 0
    (tmp_path / "project/tokens.bin").unlink()
    code, _, errors = told("eval", tmp_path / "archive", capsys)
    assert (code, len(errors)) == (2, 1)
    assert f"(relative paths are read from {tmp_path}/project, where the run was started)" in errors[0]


def test_training_a_finished_run_says_so(run, tmp_path):
    """From anywhere, by its saved config; nothing but the start's number changes, and a missing page is written."""
    (run / "report.html").unlink()  # as if it had been ended before
    command = [sys.executable, "-m", "launcher", "train", "project/runs/small/config.yaml", "--ranks", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "runs/small is complete: step 2 of train.steps=2, in runs/small/checkpoints; to train on, raise train.steps"
    )
    assert "small" in (run / "report.html").read_text()


def test_training_a_finished_run_does_not_depend_on_who_reads(run, tmp_path):
    """`train ... | grep -q x`, and output to a disk that is full."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "launcher", "train", "project/runs/small/config.yaml", "--ranks", "1"]
    with os.fdopen(writer, "w") as gone:
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, stdout=gone, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_all_ranks_of_a_job_refuse_a_damaged_run_together(run):
    replace_by(Path.mkdir)(run / ".fence")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    job = {**ENVIRONMENT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def ask(rank: str) -> subprocess.CompletedProcess[str]:
        return run_forked(["train", "small.yaml"], Path.cwd(), {**job, "RANK": rank, "LOCAL_RANK": rank})

    with ThreadPool(2) as pool:
        ranks = pool.map(ask, "01")
    for rank in ranks:
        assert (rank.returncode, rank.stderr.splitlines()) == (
            2,
            [f"runs/small/.fence must be a file, and is a folder; {MOVE_AWAY}"],
        )


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", "metrics.jsonl", ".fence"])
def test_a_run_whose_files_are_taken_away_ends_and_says_so(run, part):
    command = [sys.executable, "-m", "launcher", "train", "small.yaml", "train.steps=100000", "--ranks", "1"]
    training = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 240
    while '"step": 3' not in (run / "ledger.jsonl").read_text():
        assert training.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    replace_by(lambda path: None)(run / part)
    errors = training.communicate(timeout=120)[1].splitlines()
    assert (training.returncode, len(errors)) == (1, 1), errors
    assert "taken away" in errors[0]


def hear_interrupts() -> None:
    """A shell's background jobs, these tests' among them, inherit SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_in_session(command: list[str]) -> subprocess.Popen[str]:
    """A command whose processes all hear what is sent to its group, as from a terminal."""
    return subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=hear_interrupts,
    )


@pytest.mark.slow
@pytest.mark.parametrize("every_steps", ["1", "null"])
def test_an_interrupt_says_what_is_saved_and_how_to_go_on(run, every_steps):
    shutil.rmtree(run)
    overrides = ["train.steps=100000", f"checkpoint.every_steps={every_steps}"]
    command = [sys.executable, "-m", "launcher", "train", "small.yaml", *overrides, "--ranks", "1"]
    training = start_in_session(command)
    deadline = time.monotonic() + 240
    while not (run / "ledger.jsonl").exists() or '"step": 3' not in (run / "ledger.jsonl").read_text():
        assert training.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(training.pid, signal.SIGINT)
    errors = training.communicate(timeout=120)[1].splitlines()
    assert training.returncode == 130
    assert f"`roundtable {shlex.join(command[3:])}` " in errors[-1]
    assert ("is step" if every_steps == "1" else "holds no checkpoint yet") in errors[-1]
    assert len(errors) == 1


def test_two_interrupts_at_once_are_one_line(run):
    """The ranks hear the second while the launcher, which the first one has ended, no longer listens to them."""
    shutil.rmtree(run)
    command = [sys.executable, "-m", "launcher", "train", "small.yaml", "train.steps=100000", "--ranks", "2"]
    training = start_in_session(command)
    deadline = time.monotonic() + 240
    while not (run / "ledger.jsonl").exists() or '"step": 3' not in (run / "ledger.jsonl").read_text():
        assert training.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    for _ in range(2):
        os.killpg(training.pid, signal.SIGINT)
        time.sleep(0.02)
    errors = training.communicate(timeout=120)[1].splitlines()
    assert (training.returncode, len(errors)) == (130, 1), errors


ON_THE_WAY_OUT = """
import signal, sys
from launcher import cli
signal.signal(signal.SIGINT, signal.default_int_handler)
cli.app = lambda **_: signal.raise_signal(signal.SIGINT)
sys.argv = ["roundtable", "runs"]
assert cli.main() == 130
signal.raise_signal(signal.SIGINT)
"""


def test_an_interrupt_on_the_way_out_needs_no_words():
    command = [sys.executable, "-c", ON_THE_WAY_OUT]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


WHILE_IMPORTING = """\
import sys, time
from launcher import cli

def app(**_):
    import slow_library
    time.sleep(60)

cli.app = app
sys.argv = ["roundtable", "runs"]
sys.exit(cli.main())
"""
SLOW_LIBRARY = """\
import time
print("importing", flush=True)
deadline = time.monotonic() + float(__import__("os").environ["IMPORT_SECONDS"])
while time.monotonic() < deadline:
    time.sleep(0.01)
print("imported", flush=True)
"""


@pytest.mark.parametrize(("presses", "seconds", "told"), [([0.0, 0.0], 3, "imported\n"), ([0.0, 1.0], 100, "")])
def test_a_second_interrupt_ends_an_import_at_once(tmp_path, presses, seconds, told):
    """Two at once are one, which waits for the library to be whole; a later one is a user's who waits no longer."""
    (tmp_path / "slow_library.py").write_text(SLOW_LIBRARY)
    path = f"{tmp_path}{os.pathsep}{ENVIRONMENT.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", WHILE_IMPORTING]
    environment = {**ENVIRONMENT, "PYTHONPATH": path, "IMPORT_SECONDS": str(seconds)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": hear_interrupts}
    process = subprocess.Popen(command, env=environment, text=True, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    for pause in presses:
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, told, "")


def test_an_interrupt_while_the_fork_server_imports_is_one_line(run):
    shutil.rmtree(run)
    command = [sys.executable, "-m", "launcher", "train", "small.yaml", "--ranks", "2"]
    training = start_in_session(command)
    children = Path(f"/proc/{training.pid}/task/{training.pid}/children")
    deadline = time.monotonic() + 240

    def is_importing() -> bool:
        texts = [Path(f"/proc/{pid}/maps").read_text() for pid in children.read_text().split()]
        return any("libtorch" in text for text in texts)

    while not is_importing():
        assert training.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(training.pid, signal.SIGINT)
    errors = training.communicate(timeout=120)[1].splitlines()
    assert (training.returncode, len(errors)) == (130, 1), errors
    assert "holds no checkpoint yet" in errors[0]
