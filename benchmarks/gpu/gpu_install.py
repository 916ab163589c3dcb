"""Installs the wheels beside it into the checkout's .venv, over the packages of the Python that runs it. No network.

    python3 build/gpu-wheels/install.py [--run ARGUMENTS OF hour.py]

The Python that runs it has torch and transformers, and may itself be a virtual environment: .venv then sees its
packages by a .pth file, which ``--system-site-packages`` would not do. With --run the parts begin at once.
"""

import os
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = next((folder for folder in HERE.parents if (folder / "benchmarks" / "gpu" / "hour.py").exists()), None)
NEEDED = ("torch", "transformers", "deepspeed", "pydantic", "ruamel.yaml", "datasets", "wandb", "typer", "hypothesis")


def main() -> int:
    """The command; exit code 2 where it cannot begin."""
    if ROOT is None:
        return told(f"{HERE} must lie in a checkout of Roundtable, as build/gpu-wheels")
    if sys.version_info[:2] != (3, 12):
        return told(f"the wheels are for Python 3.12, and this is {sys.version.split()[0]}; try python3.12")
    folder = ROOT / ".venv"
    venv.EnvBuilder(with_pip=False, clear=True, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    seen = [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (packages / "zz_below.pth").write_text("\n".join(dict.fromkeys([str(ROOT), *seen])) + "\n")
    wheels = sorted(map(str, HERE.glob("*.whl")))
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--ignore-installed", "--quiet"]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *wheels]
    if subprocess.run(command, check=False).returncode:
        return told("pip could not install the wheels; its words are above")
    (folder / ".installed").touch()
    # What fits badly may work all the same: it is shown, and the imports decide.
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "check"], check=False)
    asked = "; ".join(f"import {name}" for name in NEEDED)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if subprocess.run([str(python), "-c", asked], cwd=ROOT, env=environment, check=False).returncode:
        return told("a package cannot be imported; its name is above")
    print(f"{len(wheels)} wheels in {folder}; now: make gpu, or {python} benchmarks/gpu/hour.py", flush=True)
    if "--run" in sys.argv:
        arguments = sys.argv[sys.argv.index("--run") + 1 :]
        return subprocess.run([str(python), "benchmarks/gpu/hour.py", *arguments], cwd=ROOT, check=False).returncode
    return 0


def told(problem: str) -> int:
    """Says what is wrong, in one line."""
    print(f"install.py: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
