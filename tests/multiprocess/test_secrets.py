"""A secret that a job gets by name is in no file: submitted to a Slurm that only notes what it is given, and run."""

import dataclasses
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from fake_programs import write_programs
from launcher.config.dump import dump_config
from launcher.config.tree import CheckpointConfig
from launcher.slurm.config import SlurmConfig
from launcher.watch.wandb_read import wandb_files
from layout_runs import DENSE_MODEL, run_config, write_tokens

SECRET = "Pl4nted0fS0meL3ngth"
FAKES = {
    "sinfo": 'echo "main*|4|(null)|infinite"',
    "squeue": ":",
    "sbatch": 'if [ "$1" = --test-only ]; then cat > /dev/null; else echo "$@" > submitted.txt; echo 7; fi',
}


def command(folder: Path, *arguments: str) -> str:
    """What a command of Roundtable's prints, started where HF_TOKEN is set; it must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "SBATCH_"))}
    environment |= {"HF_TOKEN": SECRET, "OMP_NUM_THREADS": "1", "HOME": str(folder / "home")}
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    command = [sys.executable, "-m", "launcher", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def holds(data: bytes, secret: str) -> bool:
    return secret.encode() in data or secret.encode() in inflate(data)


def inflate(data: bytes) -> bytes:
    """What a compressed file holds; nothing of any other."""
    try:
        return zlib.decompressobj(wbits=47).decompress(data)
    except zlib.error:
        return b""


def files_with(folder: Path, secret: str) -> list[str]:
    found = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path.relative_to(folder)) for path in found if holds(path.read_bytes(), secret)]


@pytest.mark.slow
def test_a_secret_passed_by_name_is_in_no_file(tmp_path):
    write_programs(tmp_path / "bin", FAKES)
    slurm = SlurmConfig(gpus_per_node=0, environment=("HF_TOKEN", "VISIBLE=yes"), notice_seconds=60)
    config = run_config(write_tokens(tmp_path), model=DENSE_MODEL, steps=2)
    config = dataclasses.replace(config, name="small", slurm=slurm, checkpoint=CheckpointConfig(every_steps=1))
    (tmp_path / "config.yaml").write_text(dump_config(config))

    shown = command(tmp_path, "submit", "config.yaml")
    assert (tmp_path / "submitted.txt").read_text() == "--parsable runs/small/slurm/train.sbatch\n"
    shown += command(tmp_path, "config", "runs/small/slurm/config.yaml")
    for _ in range(2):  # the second goes on from the first's checkpoint
        shown += command(
            tmp_path, "train", "runs/small/slurm/config.yaml", "metrics.wandb.mode=offline", "train.steps=3"
        )
    run = tmp_path / "runs" / "small"
    assert wandb_files(run)
    assert list(run.glob("checkpoints/step-*/config.yaml"))
    assert (SECRET in shown, files_with(tmp_path, SECRET)) == (False, [])
    assert len(files_with(tmp_path, "VISIBLE=yes")) > 4, (
        "the search sees what is written down: config, script, checkpoints"
    )
    assert any("wandb" in path for path in files_with(tmp_path, "VISIBLE=yes"))
