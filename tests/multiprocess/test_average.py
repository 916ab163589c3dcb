"""`roundtable average`: the mean of checkpoints, as a run directory that other commands take."""

import itertools
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from command_runs import train, write_config
from launcher.cli import main
from launcher.commands import average
from launcher.commands.runs import list_runs
from launcher.commands.trained import Trained, load_decoder, open_trained
from launcher.config.load import load_config
from layout_runs import write_tokens
from modeling.logical import logical_shapes
from parallel.checkpoint.boxes import Box
from parallel.processes.start import fork_server
from parallel.processes.stop import STOP_SIGNALS
from small_disk import small_disk

pytestmark = pytest.mark.xdist_group("average")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder of two runs that differ in their seed, of six steps with checkpoints after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("made")
    tokens = write_tokens(folder)
    heldout = f"data.heldout_path={tokens}"
    train(write_config(folder, tokens, "run"), 1, heldout)
    train(write_config(folder, tokens, "other"), 2, heldout, "seed=1")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def checkpoint(run: Path, step: int) -> str:
    return str(run / f"checkpoints/step-{step:08d}")


def mean_of(members: list[Trained], weights: list[float], name: str) -> torch.Tensor:
    summed = sum(member.read(name).double() * weight for member, weight in zip(members, weights, strict=True))
    assert isinstance(summed, torch.Tensor)
    return (summed / sum(weights)).float()


@pytest.mark.parametrize(
    ("given", "options", "weights"),
    [
        (["run"], ["--last", "3"], [1, 1, 1]),
        (["run", "other"], [], [1, 1]),
        (["run", "other"], ["--weights", "1,3"], [1, 3]),
        (["run", "other"], ["--last", "2", "--weights", "1,1,1,5"], [1, 1, 1, 5]),
    ],
    ids=str,
)
def test_every_weight_is_the_mean(made, tmp_path, capsys, monkeypatch, given, options, weights):
    """Bit for bit that of fp64; the second run was trained on two ranks. Tensors are read in parts."""
    monkeypatch.setattr(average, "BLOCK_ELEMENTS", 100)
    before = files_of(made)
    last = int(options[1]) if "--last" in options else 1
    paths = [checkpoint(made / run, step) for run in given for step in (2, 4, 6)[-last:]]
    assert main(["average", *(str(made / run) for run in given), str(tmp_path / "mean"), *options]) == 0
    assert files_of(made) == before
    out, members = capsys.readouterr().out, [open_trained(path) for path in paths]
    words = {1: "step 6", 2: "steps 4 and 6", 3: "steps 2, 4 and 6"}[last]
    assert f"the mean of {len(paths)} checkpoints" in out and f"{made / given[-1]} at {words})" in out
    found = open_trained(tmp_path / "mean")
    for name in logical_shapes(found.config.model):
        assert torch.equal(found.read(name), mean_of(members, weights, name)), name
    attached = found.checkpoint.attached(average.AVERAGED_JSON)
    assert attached is not None
    told = json.loads(attached.read_text())
    assert [(each["checkpoint"], each["weight"]) for each in told] == list(zip(paths, weights, strict=True))


def test_other_commands_take_it(made, tmp_path, capsys):
    """It is evaluated as its weights in the run's place are, exported, and a run begins with it; none goes on in it."""
    mean = tmp_path / "mean"
    assert main(["average", str(made / "run"), str(mean), "--last", "2"]) == 0
    capsys.readouterr()
    assert main(["eval", str(mean), "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["eval_loss"]
    assert main(["eval", str(made / "run"), "--json"]) == 0
    assert abs(loss - json.loads(capsys.readouterr().out)["eval_loss"]) < 0.1
    assert main(["export", str(mean), str(tmp_path / "hf"), "--verify"]) == 0
    assert main(["checkpoint", "verify", str(mean)]) == 0
    capsys.readouterr()
    assert main(["train", str(mean / "config.yaml")]) == 2
    assert "holds imported or averaged weights" in capsys.readouterr().err
    config = made / "run.yaml"
    begun = ["name=begun", f"run_dir={tmp_path / 'begun'}", f"init_from={mean}", "train.steps=1"]
    assert main(["train", str(config), *begun]) == 0
    first = load_decoder(open_trained(mean), "cpu", torch.float32)
    assert load_config(tmp_path / "begun/config.yaml").init_from == checkpoint(mean, 0)
    assert torch.isfinite(next(first.parameters())).all()


REFUSED = {
    "one alone": (["run", "OUT"], [], "CHECKPOINT=RUN is one checkpoint, and a mean is of at least two; "),
    "more than there are": (["run", "OUT"], ["--last", "4"], "--last=4 must be at most 3, CHECKPOINT=RUN has step-"),
    "one twice": (
        ["run", "run/checkpoints/step-00000006", "OUT"],
        [],
        "CHECKPOINT=RUN/checkpoints/step-00000006 must be given once; ",
    ),
    "one twice, spelled otherwise": (
        ["run", "other/../run", "OUT"],
        [],
        "CHECKPOINT=RUN/checkpoints/step-00000006 must be given once; ",
    ),
    "no place": (["run"], [], "OUT is missing after RUN; "),
    "weights for others": (
        ["run", "other", "OUT"],
        ["--weights", "1,2,3"],
        "--weights=1,2,3 must be 2 numbers from 0.000001 to 1000000, one for each checkpoint, with commas; try 1,2, ",
    ),
    "no numbers": (["run", "other", "OUT"], ["--weights", "1,x"], "--weights=1,x must be 2 numbers"),
    "a weight of nothing": (["run", "other", "OUT"], ["--weights", "1,0"], "--weights=1,0 must be 2 numbers"),
    "not a number": (["run", "other", "OUT"], ["--weights", "nan,1"], "--weights=nan,1 must be 2 numbers"),
    "too large a one": (["run", "other", "OUT"], ["--weights", "1e308,1"], "--weights=1e308,1 must be 2 numbers"),
    "no run": (["run", "none", "OUT"], [], "CHECKPOINT=NONE is not a folder; "),
    "a place that is there": (["run", "other", "run"], [], "OUT=RUN "),
    "within a run": (["run", "other", "run/new"], [], "OUT=RUN/new must lie outside RUN, which is only read; "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_take_a_line_and_create_nothing(case, made, tmp_path, capsys):
    paths, options, expected = REFUSED[case]
    before = files_of(made)
    given = [str(tmp_path / "mean") if path == "OUT" else str(made / path) for path in paths]
    assert main(["average", *given, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(expected.replace("RUN", str(made / "run")).replace("NONE", str(made / "none")))
    assert files_of(made) == before and list(tmp_path.iterdir()) == []


def stopped_at(n_blocks: int, signum: int, arguments: list[str]) -> None:
    """The command in a process that is signalled while it reads a block."""
    read = Trained.read_box
    counted = itertools.count(1)

    def read_box(self: Trained, name: str, box: Box) -> torch.Tensor:
        if next(counted) == n_blocks:
            os.kill(os.getpid(), signum)
        return read(self, name, box)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # which wait in what a fork server starts
    Trained.read_box = read_box  # type: ignore[method-assign]
    raise SystemExit(main(arguments))


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -signal.SIGKILL),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_no_half_of_it(made, tmp_path, capsys, signum, code):
    """A kill leaves a hidden folder that is no run; the same command then works."""
    arguments = ["average", str(made / "run"), str(tmp_path / "mean"), "--last", "3"]
    before = files_of(made)
    process = fork_server().Process(target=stopped_at, args=(random.Random(signum).randrange(1, 40), signum, arguments))
    process.start()
    process.join(60)
    assert process.exitcode == code
    left = list(tmp_path.iterdir())
    assert len(left) == (1 if signum == signal.SIGKILL else 0) and list_runs([str(tmp_path)]) == []
    assert main(arguments) == 0 and main(["checkpoint", "verify", str(tmp_path / "mean")]) == 0
    assert {*tmp_path.iterdir()} == {tmp_path / "mean", *left} and files_of(made) == before


def test_a_disk_that_fills_up_leaves_nothing(made, tmp_path, capsys, monkeypatch):
    """And one that is full already is told before."""
    read, counted = Trained.read_box, itertools.count(1)
    with small_disk(tmp_path / "disk", mib=1) as disk:
        arguments = ["average", str(made / "run"), str(disk / "mean"), "--last", "3"]

        def read_box(self: Trained, name: str, box: Box) -> torch.Tensor:
            if next(counted) == 20:
                fill(disk)
            return read(self, name, box)

        with monkeypatch.context() as patched:
            patched.setattr(Trained, "read_box", read_box)
            assert main(arguments) == 1
        told = f"{disk}/mean: No space left on device; free some space, or choose another disk\n"
        assert capsys.readouterr().err == told and list(disk.iterdir()) == [disk / "filler"]
        fill(disk)
        assert main(arguments) == 2
        assert " KiB, but the disk has 0 bytes free; " in capsys.readouterr().err
        (disk / "filler").unlink()
        assert main(arguments) == 0 and list(disk.iterdir()) == [disk / "mean"]


def fill(disk: Path) -> None:
    with (disk / "filler").open("ab") as file:
        file.write(bytes(shutil.disk_usage(disk).free))


def test_other_models_and_damage_are_refused(made, tmp_path, capsys):
    shutil.copytree(made / "run", tmp_path / "turned")
    text = (made / "run/config.yaml").read_text()
    for path in tmp_path.rglob("config.yaml"):
        path.write_text(text.replace("rope_theta: 10000.0", "rope_theta: 500.0"))
    assert "rope_theta: 500.0" in (tmp_path / "turned/config.yaml").read_text()
    assert main(["average", str(made / "run"), str(tmp_path / "turned"), str(tmp_path / "mean")]) == 2
    told = capsys.readouterr().err
    assert "model.rope_theta=500.0 must be 10000.0, as in" in told or "is damaged" in told
    shutil.copytree(made / "run", tmp_path / "torn")
    shard = next((tmp_path / "torn/checkpoints/step-00000004").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["average", str(tmp_path / "torn"), str(tmp_path / "mean"), "--last", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step-00000004 is damaged" in line and line.endswith("; give the others by their folders")
    assert not (tmp_path / "mean").exists()


def test_a_checkpoint_with_nan_is_named_and_one_outside_its_run_may_have_the_mean_beside_it(made, tmp_path, capsys):
    """What lies above a lone checkpoint's folder is no run directory."""
    shutil.copytree(checkpoint(made / "run", 6), tmp_path / "kept/one")
    assert main(["average", str(tmp_path / "kept/one"), str(made / "other"), str(tmp_path / "mean")]) == 0
    inside = tmp_path / "kept/one/mean"
    assert main(["average", str(tmp_path / "kept/one"), str(made / "other"), str(inside)]) == 2
    assert "which is only read; give another path" in capsys.readouterr().err and not inside.exists()
    spoiled = open_trained(made / "other")
    read = Trained.read_box

    def with_nan(self: Trained, name: str, box: Box) -> torch.Tensor:
        values = read(self, name, box)
        return values.fill_(torch.nan) if self.config.seed == 1 and name == "final_norm.weight" else values

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trained, "read_box", with_nan)
        assert main(["average", str(made / "run"), str(made / "other"), str(tmp_path / "spoiled")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    where = spoiled.checkpoint.folder.location
    assert (
        line
        == f"CHECKPOINT={where} must hold finite numbers, and final_norm.weight holds NaN or infinity; leave it out"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "mean"}
