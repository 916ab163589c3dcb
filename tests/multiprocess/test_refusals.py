"""What a user gets wrong, through the real command: exit code 2, one line a problem, and nothing created or changed."""

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from data.config import DataConfig, SourceConfig
from data_reference import write_token_file
from forked_command import run_forked
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from launcher.training.run_dir import claim
from layout_runs import MOE_MODEL, VOCAB_SIZE, run_config, write_tokens
from modeling.optimizers.config import AdamWConfig

pytestmark = pytest.mark.xdist_group("refusals")  # what its tests share takes long to make

AT_ONCE = 2
JOB_VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
RAW_TEXT = "data.sources=[{path: corpus.txt}]"
LARGER_VOCABULARY = "model.vocab_size=300"
TEXT_MODEL = dataclasses.replace(MOE_MODEL, vocab_size=300)
TEXT_DATA = DataConfig(seq_len=24, sources=(SourceConfig(path="corpus.txt"),))
WIDER = ["model.d_model=64", "model.d_ff=256"]  # two checkpoints of more than the megabyte that there is


@dataclass(frozen=True)
class Case:
    """A mistake: what is done to a good folder, the command, and each line that it must answer with.

    A line is given in parts, all of which it holds in this order: key and value (or the file), the rule, the remedy.
    """

    lines: list[tuple[str, ...]]
    overrides: list[str] = field(default_factory=list)
    arrange: Callable[[Path], object] = bool  # what is done to the folder before; by default nothing
    command: str = "train"
    config: str = "config.yaml"
    environment: dict[str, str] = field(default_factory=dict)
    is_real: bool = False  # asked of a new interpreter


def small_config() -> RunConfig:
    """A run of two ranks on the token files ``tokens`` of the current folder."""
    return dataclasses.replace(run_config("tokens", optimizer=AdamWConfig(lr=1e-3)), name="small")


def cut(name: str, n_bytes: int) -> Callable[[Path], None]:
    """Takes the last bytes of a file away."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - n_bytes)


def overwrite(name: str, content: bytes) -> Callable[[Path], None]:
    """Overwrites the beginning of a file, or makes it."""

    def do(folder: Path) -> None:
        old = (folder / name).read_bytes() if (folder / name).exists() else b""
        (folder / name).write_bytes(content + old[len(content) :])

    return do


def big_id(folder: Path) -> None:
    """The token files hold one id that is not in the vocabulary."""
    write_token_file(folder / "tokens", [[1, 2, VOCAB_SIZE], *[[3] * 24] * 20])


def raw_and_big_id(folder: Path) -> None:
    """Raw text that is to be prepared, beside a foreign file that does not fit."""
    (folder / "corpus.txt").write_text("some text\n" * 50)
    write_token_file(folder / "tokens", [[1, 2, 300]])


def damaged_twice(folder: Path) -> None:
    """Held-out token files of which nothing is right, and training ones that are cut short."""
    overwrite("held.bin", b"12")(folder)
    overwrite("held.idx", b"12")(folder)
    cut("tokens.bin", 100)(folder)


def started(folder: Path) -> None:
    """The run directory of a run that was started with the folder's config."""
    claim(dataclasses.replace(small_config(), run_dir=str(folder / "runs/small"))).close()


JOB = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
REWRITE = "; copy the file again"
NO_FILE = ("none.yaml", "no such file", "; give the path")
NO_CORPUS = ("data.sources[0].path='none.txt'", "does not exist", "; check the path")
NO_TEXT = ("data.sources[0].path='corpus.txt'", "holds no text", "; give a path")
SHORT_BIN = ("tokens.bin has ", "tokens.idx describes ", "must be equal", REWRITE)
CASES = {
    "unknown key": Case(
        [("train.global_batchsize=8", "is not a known key", "; did you mean train.global_batch_size?")],
        ["train.global_batchsize=8"],
        is_real=True,
    ),
    "wrong type": Case([("train.steps='ten'", "must be an integer", "; write")], ["train.steps=ten"]),
    "missing config": Case([NO_FILE], config="none.yaml"),
    "missing data file": Case([NO_CORPUS], ["data.sources=[{path: none.txt}]", LARGER_VOCABULARY]),
    "empty corpus": Case([NO_TEXT], [RAW_TEXT, LARGER_VOCABULARY], overwrite("corpus.txt", b"")),
    "corrupt idx": Case(
        [("tokens.idx begins with ", "a Megatron index begins with ", REWRITE)],
        arrange=overwrite("tokens.idx", b"MMXDIDX"),
    ),
    "truncated bin": Case([SHORT_BIN], arrange=cut("tokens.bin", 100)),
    "truncated bin in a job": Case([SHORT_BIN], arrange=cut("tokens.bin", 100), environment=JOB, is_real=True),
    "two damaged files": Case(
        [SHORT_BIN, ("held.idx has 2 bytes", "takes 34", REWRITE)],
        ["data.heldout_path=held", "train.eval_every_steps=2"],
        damaged_twice,
    ),
    "foreign id": Case(
        [
            (
                "model.vocab_size=96",
                "largest token id, 96, in tokens.bin",
                "must be above",
                "; set model.vocab_size to 97",
            )
        ],
        arrange=big_id,
    ),
    "foreign id beside text to prepare": Case(
        [("model.vocab_size=300", "largest token id, 300, in tokens.bin", "; set model.vocab_size to 301")],
        ["data.sources=[{path: corpus.txt}, {path: tokens}]", LARGER_VOCABULARY],
        raw_and_big_id,
    ),
    "batch that does not divide": Case(
        [("train.global_batch_size=10", "must be a multiple of dp=2 x train.micro_batch_size=2 = 4", "; try 8 or 12")],
        ["train.global_batch_size=10"],
    ),
    "seq_len of 0": Case([("data.seq_len=0", "must be at least 1", "; try ")], ["data.seq_len=0"]),
    "more top_k than experts": Case(
        [("model.moe.top_k=5", "must be at most model.moe.n_experts=4", "; try 4")], ["model.moe.top_k=5"]
    ),
    "heads that do not divide": Case(
        [("model.n_kv_heads=3", "must divide model.n_heads=4", "; try 2 or 4")], ["model.n_kv_heads=3"]
    ),
    "layout that does not fit": Case(
        [
            ("parallel.tp=3", "must divide the number of processes=2", "; try parallel.tp=2"),
            ("parallel.tp=3", "must divide model.n_heads=4", "; try 1 or 2"),
            ("parallel.tp=3", "must divide model.n_kv_heads=2", "; try 1 or 2"),
        ],
        ["parallel.tp=3"],
    ),
    "several at once": Case(
        [("data.seq_len=0", "; try "), ("train.steps=0", "; try "), ("model.n_kv_heads=3", "; try ")],
        ["train.steps=0", "data.seq_len=0", "model.n_kv_heads=3"],
    ),
    "another model in the run directory": Case(
        [
            ("model.d_ff=64", "must stay 48", "runs/small", "; set it back"),
            ("model.moe.n_experts=8", "must stay 4", "runs/small", "; set it back"),
        ],
        ["model.d_ff=64", "model.moe.n_experts=8"],
        started,
    ),
    "run directory that cannot be": Case(
        [("run_dir=config.yaml/run", "must be a folder that can be written to", "; choose another run_dir")],
        ["run_dir=config.yaml/run"],
    ),
    "run directory that is a broken link": Case(
        [("run_dir=link", "must be a folder that can be written to, but", "link is not", "; choose another run_dir")],
        ["run_dir=link"],
        lambda folder: (folder / "link").symlink_to("gone"),
    ),
    "checkpoint directory that is a file": Case(
        [("checkpoint.dir=config.yaml", "must be a folder that can be written to, but", "; choose another, or null")],
        ["checkpoint.dir=config.yaml"],
    ),
    "checkpoint directory that is a file's URL": Case(
        [("checkpoint.dir=file://config.yaml", "must be a folder that can be written to, but", "; choose another")],
        ["checkpoint.dir=file://config.yaml"],
    ),
    "prepare: a picture": Case(
        [("corpus.png", "is not text: it holds NUL bytes", "; convert it")],
        ["data.sources=[{path: corpus.png}]", LARGER_VOCABULARY],
        overwrite("corpus.png", b"\x89PNG\0"),
        command="prepare",
        is_real=True,
    ),
    "prepare: unknown key": Case(
        [("data.seqlen=8", "is not a known key", "; did you mean data.seq_len?")], ["data.seqlen=8"], command="prepare"
    ),
    "prepare: wrong type": Case(
        [("data.workers='many'", "must be an integer", "; write")], ["data.workers=many"], command="prepare"
    ),
    "prepare: missing config": Case([NO_FILE], config="none.yaml", command="prepare"),
    "prepare: missing data file": Case(
        [NO_CORPUS], ["data.sources=[{path: none.txt}]", LARGER_VOCABULARY], command="prepare"
    ),
    "prepare: empty corpus": Case(
        [NO_TEXT], [RAW_TEXT, LARGER_VOCABULARY], overwrite("corpus.txt", b""), command="prepare"
    ),
    "prepare: small vocabulary": Case(
        [("model.vocab_size=96", "must be at least 257", "; set it to 257 or more")],
        [RAW_TEXT],
        overwrite("corpus.txt", b"text"),
        command="prepare",
    ),
}


@dataclass(frozen=True)
class Answer:
    """What the command said and did."""

    code: int
    output: str
    errors: list[str]
    before: dict[str, tuple]
    after: dict[str, tuple]


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file and folder below: its time of change and, of a file, what its bytes hash to."""
    return {
        str(path): (
            path.lstat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None,
        )
        for path in [folder, *folder.rglob("*")]
    }


def fill(folder: Path) -> None:
    """A good config and its token files."""
    folder.mkdir(exist_ok=True)
    write_tokens(folder)
    (folder / "config.yaml").write_text(dump_config(small_config()))


def run_real(arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def ask(folder: Path, case: Case) -> Answer:
    """Runs the command in ``folder``, with a snapshot of it and of what is beside it before and after."""
    ranks = ["--ranks", "2"] if case.command == "train" else []
    before = snapshot(folder)
    arguments = [case.command, case.config, *case.overrides, *ranks]
    environment = {**ENVIRONMENT, **case.environment}
    done = run_real(arguments, folder, environment) if case.is_real else run_forked(arguments, folder, environment)
    return Answer(done.returncode, done.stdout, done.stderr.splitlines(), before, snapshot(folder))


def assert_refused(answer: Answer, case: Case) -> None:
    """Code 2, nothing but the expected lines, nothing created or changed."""
    assert answer.code == 2, answer.errors
    assert answer.output == ""
    assert len(answer.errors) == len(case.lines), answer.errors
    for line, parts in zip(answer.errors, case.lines, strict=True):
        places = [line.find(part) for part in parts]
        assert -1 not in places, line
        assert places == sorted(places), line
    assert answer.before == answer.after


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, Answer]:
    """Every case's answer, some at a time."""
    folders = [tmp_path_factory.mktemp("case") for _ in CASES]
    for folder, case in zip(folders, CASES.values(), strict=True):
        fill(folder)
        case.arrange(folder)
    with ThreadPool(AT_ONCE) as pool:
        return dict(zip(CASES, pool.starmap(ask, zip(folders, CASES.values(), strict=True)), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_its_lines_and_changes_nothing(answers, name):
    assert_refused(answers[name], CASES[name])


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "not prepared"])
def test_a_run_directory_in_use_is_refused(tmp_path, prepared):
    fill(tmp_path)
    (tmp_path / "corpus.txt").write_text("some text\n" * 50)
    rule = ("run_dir=runs/small", "must not be in use by another live run", "; wait for it")
    config = small_config() if prepared else dataclasses.replace(small_config(), model=TEXT_MODEL, data=TEXT_DATA)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    with claim(dataclasses.replace(config, run_dir=str(tmp_path / "runs/small"))):
        case = Case([rule])
        assert_refused(ask(tmp_path, case), case)


def test_a_disk_without_room_is_refused(tmp_path):
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root can mount the small file system that this test fills")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine mounts no small file system: {mounted.stderr.strip()}")
    try:
        fill(tmp_path)
        parts = ("run_dir=disk/run", "must have room for 2 checkpoints", "GiB free", "; lower checkpoint.keep_last")
        case = Case([parts], ["run_dir=disk/run", *WIDER])
        assert_refused(ask(tmp_path, case), case)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_planted_change_is_seen(answers):
    """The check itself: a file more, a line more, a warning on standard output."""
    name = "seq_len of 0"
    answer = answers[name]
    touched = {**answer.after, "new": (0, None)}
    for broken in (
        dataclasses.replace(answer, after=touched),
        dataclasses.replace(answer, errors=[*answer.errors, "a library's warning"]),
        dataclasses.replace(answer, output="hello"),
        dataclasses.replace(answer, code=1),
    ):
        with pytest.raises(AssertionError):
            assert_refused(broken, CASES[name])
