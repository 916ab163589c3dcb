"""Gathers, in one folder, the wheels that a machine with torch and transformers but no network still needs.

    python benchmarks/gpu/gpu_wheels.py [--out build/gpu-wheels] [--have NAME...] [--beside NAME==VERSION...]

pip resolves the project's dependencies but torch for Python 3.12 on Linux, x86-64, at the versions of constraints.txt.
What comes with torch and transformers is there already, and so is what ``--have`` names (large packages, by default
matplotlib, pandas and pyarrow with theirs); the rest is downloaded, and DeepSpeed, of which there is no wheel, is
built. ``--beside transformers==5.17.0 huggingface-hub==1.33.0``: what the machine has, with which the carried ones must
agree. At the end each carried wheel's own requirements are looked at: every one is carried, or is there.
``gpu_install.py`` and the commit go along.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpu_report import ROOT, commit

BUILT = "deepspeed"
# There wherever torch and transformers are, and bound to their versions: carrying another one would break these.
THERE = (
    *("torch", "triton", "accelerate", "transformers", "tokenizers", "safetensors", "huggingface-hub", "hf-xet"),
    *("numpy", "regex", "pyyaml", "tqdm", "packaging", "setuptools", "sympy", "mpmath", "networkx", "jinja2"),
    *("markupsafe", "psutil"),
)
UNRESOLVED = ("torch", "accelerate", "triton")  # pip is not asked about them: it would fetch gigabytes
LARGE = ("matplotlib", "pandas", "pyarrow", "pillow", "contourpy", "kiwisolver", "fonttools", "cycler", "pyparsing")
TESTS = ("hypothesis", "pytest", "pytest-timeout")  # which the parts and tests/gpu import
MOST_BYTES = 64 << 20
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]


class Lacking(Exception):
    """The set cannot be made; the message is one line."""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-wheels")
    parser.add_argument("--have", nargs="*", default=list(LARGE))
    parser.add_argument("--beside", nargs="*", default=[])
    arguments = parser.parse_args()
    try:
        print(gather(arguments.out, {*THERE, *map(canonicalize_name, arguments.have)}, arguments.beside))
    except Lacking as error:
        print(f"make gpu-wheels: {error}", file=sys.stderr)
        return 1
    return 0


def gather(out: Path, there: set[str], beside: list[str]) -> str:
    """Fills the folder; returns a line about it."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    built = build(next(each for each in dependencies() if named(each, BUILT)), out)
    asked = [*dependencies(), *filter(applies, requirements(built)), *TESTS, *beside]
    pins = resolve([each for each in asked if not any(named(each, name) for name in (BUILT, *UNRESOLVED))], there)
    carried = sorted(set(pins) - there)
    download([f"{name}=={pins[name]}" for name in carried], out)
    check(out, there)
    shutil.copy(Path(__file__).with_name("gpu_install.py"), out / "install.py")
    (out / "COMMIT").write_text(commit() + "\n")
    n_bytes = sum(path.stat().st_size for path in out.iterdir())
    if n_bytes > MOST_BYTES:
        raise Lacking(f"{out} has {n_bytes >> 20} MiB, above {MOST_BYTES >> 20}; name more of what is there in HAVE")
    return (
        f"{len(carried) + 1} wheels, {n_bytes / 2**20:.1f} MiB in {out}; there must be: {', '.join(sorted(there))}. "
        f"On the machine: python3 {out.name}/install.py"
    )


def dependencies() -> list[str]:
    """The project's."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def named(requirement: str, name: str) -> bool:
    """Whether a requirement is of that distribution."""
    return canonicalize_name(Requirement(requirement).name) == name


def build(requirement: str, out: Path) -> Path:
    """The wheel of what has none, at the version that is tested."""
    pinned = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines() if named_pin(line, BUILT)]
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), pinned[0] if pinned else requirement)
    (wheel,) = out.glob(f"{BUILT}-*.whl")
    if not wheel.name.endswith("-none-any.whl"):
        raise Lacking(f"{wheel.name} was built for this Python alone; unset DS_BUILD_OPS")
    return wheel


def named_pin(line: str, name: str) -> bool:
    """Whether a line of constraints.txt pins that distribution."""
    return line.split("==")[0].strip().lower() == name


def resolve(wanted: list[str], there: set[str]) -> dict[str, str]:
    """The version of each distribution of the closure, for the machine's Python: those that are tested, if carried."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if "==" in line and canonicalize_name(line.split("==")[0].strip()) not in there]
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        constraints.write_text("\n".join(pins) + "\n")
        options = ["--dry-run", "--ignore-installed", "--report", str(report), "--target", folder]
        pip("install", *options, "--constraint", str(constraints), *target(), *wanted)
        rows = [row["metadata"] for row in json.loads(report.read_text())["install"]]
    return {canonicalize_name(row["name"]): row["version"] for row in rows}


def target() -> list[str]:
    """pip's options for the machine."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    return ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]


def download(pinned: list[str], out: Path) -> None:
    """Those wheels, and nothing that they need."""
    pip("download", "--no-deps", "--dest", str(out), *target(), *pinned)


def pip(*arguments: str) -> None:
    """Runs pip; its last line where it fails."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Lacking(f"pip {arguments[0]}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")


def applies(requirement: str) -> bool:
    """Whether a requirement is one on the machine, without extras."""
    marker = Requirement(requirement).marker
    there = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3", "sys_platform": "linux", "extra": ""}
    machine = {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    implementation = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    return marker is None or marker.evaluate({**default_environment(), **there, **machine, **implementation})


def requirements(wheel: Path) -> list[str]:
    """What a wheel's metadata says that it needs."""
    return metadata(wheel).get_all("Requires-Dist") or []


def metadata(wheel: Path):
    """A wheel's METADATA."""
    with ZipFile(wheel) as content:
        name = next(each for each in content.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(content.read(name).decode())


def check(out: Path, there: set[str]) -> None:
    """Raises Lacking where a carried wheel, or the project, needs what is neither carried nor there."""
    wheels = sorted(out.glob("*.whl"))
    versions = {canonicalize_name(metadata(wheel)["Name"]): metadata(wheel)["Version"] for wheel in wheels}
    asked = {"roundtable": dependencies(), **{wheel.name: requirements(wheel) for wheel in wheels}}
    for who, lines in asked.items():
        for requirement in map(Requirement, filter(applies, lines)):
            name = canonicalize_name(requirement.name)
            if name not in versions and name not in there:
                raise Lacking(f"{who} needs {requirement}, which is neither carried nor there")
            if name in versions and not requirement.specifier.contains(versions[name], prereleases=True):
                raise Lacking(f"{who} needs {requirement}, and {versions[name]} is carried")


if __name__ == "__main__":
    sys.exit(main())
