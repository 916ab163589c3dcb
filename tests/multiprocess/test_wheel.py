"""An installed wheel, away from the source tree, has everything that a command reads."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def roundtable(packages: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with the packages of a folder, run in another one."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "launcher", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "cluster", ["generic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("infiniband", "container"))]
)
def test_a_wheel_submits_as_the_source_tree_does(site, tmp_path, cluster):
    (tmp_path / "config.yaml").write_text(CONFIG)
    arguments = ("submit", "config.yaml", "--dry-run", "--cluster", cluster)
    installed, source = (roundtable(packages, tmp_path, *arguments) for packages in (site, ROOT))
    assert installed.returncode == 0, installed.stderr
    assert "#SBATCH --job-name=small" in installed.stdout
    assert installed.stdout == source.stdout


def test_a_wheel_knows_the_profiles(site, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    done = roundtable(site, tmp_path, "submit", "config.yaml", "--dry-run", "--cluster", "none")
    assert done.returncode == 2
    assert done.stderr.startswith("--cluster=none must be one of container, generic, infiniband, or the path of")


def test_a_wheel_knows_the_gpus(site, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    done = roundtable(site, tmp_path, "profile", "config.yaml", "--as", "none")
    assert done.returncode == 2
    assert done.stderr.startswith("--as=none must be one of A100-40GB, A100-80GB, B200, ")


def test_a_wheel_writes_the_page_that_the_source_tree_does(site, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "tokens": 8, "loss": 2.5, "lr": 0.001}\n')
    sizes = []
    for packages in (site, ROOT):
        done = roundtable(packages, tmp_path, "report", "run", "--out", "page.html")
        assert done.returncode == 0, done.stderr
        sizes.append((tmp_path / "page.html").stat().st_size)
    assert sizes[0] == sizes[1] > 50_000


def test_a_wheel_is_what_was_imported(site, tmp_path):
    code = "import launcher.slurm.profile as profile; print(profile.FOLDER.resolve())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(site)
