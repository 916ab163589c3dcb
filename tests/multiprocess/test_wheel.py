"""An installed wheel, away from the source tree, has everything that a command reads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import main

pytestmark = pytest.mark.xdist_group("wheel")  # what its tests share takes long to make

ROOT = Path(__file__).parents[2]
CONFIG = "name: small\nmodel: {n_layers: 2}\ndata: {sources: [{path: none.txt}]}\ntrain: {global_batch_size: 96}\n"
# What the build reads; pip would leave its own folders in the tree.
TREE = ("pyproject.toml", "README.md", "LICENSE", "configs", "data", "launcher", "modeling", "parallel", "slurm")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder that the wheel of this tree is installed into."""
    pytest.importorskip("setuptools", reason="a wheel is built by setuptools")
    tree, wheels, site = (tmp_path_factory.mktemp(name) for name in ("tree", "wheels", "site"))
    for name in TREE:
        subprocess.run(["cp", "-a", str(ROOT / name), str(tree)], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", str(wheels), str(tree)], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", *offline, "--target", str(site), str(wheel)], check=True)
    shutil.rmtree(tree)
    return site


def run_python(packages: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An interpreter with the packages of a folder, run in another one."""
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "cluster", ["generic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("infiniband", "container"))]
)
def test_a_wheel_submits_as_the_source_tree_does(site, tmp_path, monkeypatch, capsys, cluster):
    (tmp_path / "config.yaml").write_text(CONFIG)
    arguments = ("submit", "config.yaml", "--dry-run", "--cluster", cluster)
    installed = run_python(site, tmp_path, "-m", "launcher", *arguments)
    assert installed.returncode == 0, installed.stderr
    assert "#SBATCH --job-name=small" in installed.stdout
    monkeypatch.chdir(tmp_path)
    assert main([*arguments]) == 0
    assert installed.stdout == capsys.readouterr().out


# One process runs the commands and tells, as JSON, where its packages lie and each exit code and standard error.
SCRIPT = """
import contextlib, io, json, sys
from launcher.cli import main
from launcher.slurm.profile import FOLDER
told = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(command)
    told.append([code, errors.getvalue()])
print(json.dumps([str(FOLDER.resolve()), *told]))
"""


def test_a_wheel_knows_profiles_and_gpus_and_writes_the_page_that_the_source_tree_does(site, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "tokens": 8, "loss": 2.5, "lr": 0.001}\n')
    commands = [
        ["submit", "config.yaml", "--dry-run", "--cluster", "none"],
        ["profile", "config.yaml", "--as", "none"],
        ["report", "run", "--out", "page.html"],
    ]
    done = run_python(site, tmp_path, "-c", SCRIPT, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    folder, of_profiles, of_gpus, of_page = json.loads(done.stdout)
    assert Path(folder).is_relative_to(site)
    assert of_profiles[0] == of_gpus[0] == 2
    assert of_profiles[1].startswith("--cluster=none must be one of container, generic, infiniband, or the path of")
    assert of_gpus[1].startswith("--as=none must be one of A100-40GB, A100-80GB, B200, ")
    assert of_page[0] == 0, of_page[1]
    installed = (tmp_path / "page.html").stat().st_size
    monkeypatch.chdir(tmp_path)
    assert main(["report", "run", "--out", "page.html"]) == 0
    assert (tmp_path / "page.html").stat().st_size == installed > 50_000
