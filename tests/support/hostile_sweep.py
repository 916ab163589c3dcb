"""A careless or hostile user's inputs through the command line: `make sweep`, and every n-th of them in `make test`.

An input is well taken if the command ends with exit code 0, or with 2 and nothing but lines on stderr that say why, has
created nothing, and has taken no longer than its bound. (A checkpoint that is damaged may end `verify` with 1.)
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does

from config_ranges import RANGES
from launcher.cli import main as roundtable
from launcher.config.ranges import Range
from launcher.config.schema import leaf_keys
from launcher.config.tree import RunConfig

SECONDS = 5.0  # the most processor time of a command; one that imports torch for the first time takes two
LINE = 4000  # the most characters in a line on stderr
NUMBERS = [0, -1, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**18, 10**30, 10**400]
FLOATS = ["0.0", "-0.5", "1e-320", "1e-45", "1e308", "1e999", ".inf", "-.inf", ".nan", "0x10", "1_000", "07", "1e3"]
WORDS = [
    *(
        "null",
        "true",
        "no",
        "~",
        "''",
        "' '",
        "x",
        "[]",
        "{}",
        "[1, 2]",
        "{a: 1}",
        "[[[]]]",
        "[null]",
        "{name: x}",
        "2026-11-22",
    ),
    *(
        "adamw",
        "sgd",
        "cosine",
        "none",
        "bias",
        "zbv",
        "fp32",
        "../..",
        "/dev/zero",
        "/dev/null",
        "/proc/self/mem",
        "~root",
    ),
    *(
        "s3://bucket/x",
        "nowhere://x",
        "file:///nowhere/x",
        "http://127.0.0.1:9/x",
        "hf://",
        "memory://x",
        "$HOME",
        "${HOME}",
    ),
    *(
        "$(touch pwned)",
        "`touch pwned`",
        "x; touch pwned",
        "--help",
        "-x",
        '"',
        "'\"\\'",
        "\\",
        "a=b",
        "=",
        "%n",
        "{0}",
    ),
    *(
        '"\\0"',
        '"\\n"',
        '"\\e[2J"',
        '"\\u202e"',
        "[red]x[/red]",
        "é" * 10,
        "x" * 300,
        "x/" * 3000,
        "[" * 200,
        "&a [*a]",
        "!!python/name:os",
    ),
]
PATHS = [
    "",
    " ",
    ".",
    "..",
    "/",
    "/dev/null",
    "/dev/zero",
    "/proc",
    "/proc/self/mem",
    "/etc/passwd",
    "nothing",
    "x" * 300,
    "x/" * 3000,
]
PATHS += [
    "a\x1b[2Jb",
    "[red]x",
    "\u202ex",
    "--",
    "-",
    "~nobody/x",
    "folder",
    "text.txt",
    "empty.json",
    "loop",
    "pipe",
    "dangling",
]
PATHS += [
    "s3://",
    "nowhere://x",
    "file://",
    "file:///nowhere",
    "http://127.0.0.1:9/",
    "memory://x",
    "hf://x/y",
    "%00",
    "a\nb",
    "a\0b",
    "\udcff",
]
COMMANDS: list[list[str]] = [
    *(
        ["config", "PATH"],
        ["config", "PATH", "train.steps=5"],
        ["prepare", "PATH"],
        ["train", "PATH"],
        ["prove", "PATH"],
    ),
    *(["submit", "PATH", "--dry-run"], ["submit", "config.yaml", "--dry-run", "--cluster", "PATH"]),
    *(
        ["submit", "config.yaml", "--dry-run", "--sweep", "PATH"],
        ["preflight", "PATH"],
        ["preflight", "config.yaml", "--ranks", "PATH"],
    ),
    *(["eval", "PATH"], ["eval", "PATH", "--json"], ["export", "PATH", "out"], ["generate", "PATH", "--prompt", "x"]),
    *(["inspect", "PATH", "--text", "x"], ["inspect", "runs/gone", "--text-file", "PATH"]),
    *(["eval", "runs/gone", "--text", "PATH"], ["preflight", "config.yaml", "--ranks", "PATH", "--bad-nodes", "PATH"]),
    *(["eval", "PATH", "--tasks", "task.yaml"], ["eval", "config.yaml", "--tasks", "PATH.yaml"]),
    *(["import", "PATH", "out"], ["import", "folder", "PATH"]),
    *(["average", "PATH", "PATH", "out"], ["average", "runs/gone", "runs/gone", "PATH"], ["average", "PATH"]),
    *(["checkpoint", "show", "PATH"], ["checkpoint", "verify", "PATH"], ["checkpoint", "show", "PATH", "--json"]),
    *(
        ["logs", "PATH"],
        ["logs", "PATH", "--job"],
        ["status", "PATH", "--json"],
        ["train", "config.yaml", "--ranks", "PATH"],
    ),
    *(
        ["config", "config.yaml", "PATH"],
        ["config", "config.yaml", "PATH=1"],
        ["PATH"],
        ["checkpoint", "PATH"],
        ["config", "--PATH"],
    ),
    *(
        ["runs", "PATH"],
        ["runs", "PATH", "--json"],
        ["runs", "--clean", "--yes", "PATH"],
        ["plot", "PATH"],
        ["report", "PATH"],
        ["report", "config.yaml", "--out", "PATH"],
        ["coords", "PATH", "out.png"],
        ["profile", "PATH"],
        ["profile", "config.yaml", "--as", "PATH"],
        ["profile", "config.yaml", "--as", "none", "--out", "PATH"],
        ["profile", "config.yaml", "--steps", "PATH"],
        ["coords", "config.yaml", "PATH"],
        ["coords", "config.yaml", "out.png", "--widths", "PATH"],
        ["cancel", "PATH"],
        ["train", "PATH", "--dry-run"],
        ["config", "config.yaml", "run_dir=PATH"],
    ),
]
LEGAL = [
    ["preflight", "empty.json"],
    ["profile", "empty.json"],
]  # nothing is set there, and both write what they measure


@dataclass
class Sweep:
    """The number of inputs by kind and by exit code, and a line for each violation."""

    tried: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def inputs() -> Iterator[tuple[str, list[str]]]:
    """Every input, as its kind and the command line."""
    for key in sorted(set(leaf_keys(RunConfig))):
        for value in [*map(str, NUMBERS), *FLOATS, *WORDS, *(ends(RANGES[key]) if key in RANGES else [])]:
            yield "one key", ["config", "config.yaml", f"{key}={value}"]
    for command in COMMANDS:
        for path in PATHS:
            words = [part.replace("PATH", path) for part in command]
            if words not in LEGAL:
                yield "paths and arguments", words


def ends(limits: Range) -> list[str]:
    """The numbers at the ends of a range, and those just outside."""
    return [str(each) for each in (limits.minimum - 1, limits.minimum, limits.maximum, limits.maximum + 1)]


def furnish(folder: Path) -> None:
    """Creates the files that the command lines name: a config, and files and links that are none."""
    (folder / "config.yaml").write_text("name: small\nmodel: {n_layers: 2}\ndata: {sources: [{path: text.txt}]}\n")
    (folder / "text.txt").write_text("just text\n")
    (folder / "empty.json").write_text("{}")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nothing")
    os.mkfifo(folder / "pipe")


def problem_with(arguments: list[str]) -> tuple[int, str | None]:
    """Runs the command in the current folder; returns its exit code, and a text that describes a violation, or None."""
    before, began = tree("."), time.process_time()
    out, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = roundtable(arguments)
    except BaseException:
        return 1, traceback.format_exc()
    seconds, lines = time.process_time() - began, errors.getvalue().splitlines()
    if tree(".") != before:
        return code, f"created or changed {sorted(tree('.') ^ before)}"
    if seconds > SECONDS:
        return code, f"took {seconds:.1f} s of processor time"
    if code not in (0, 2):
        return code, f"exit code {code}: {errors.getvalue()[-500:]}"
    if code == 2 and not lines:
        return code, "exit code 2 without a word"
    odd = [line for line in lines if not line.isprintable() or not line.strip() or len(line) > LINE]
    return code, f"stderr holds {odd[0][:200]!r}" if odd else None


def tree(folder: str) -> set[tuple[str, int, int]]:
    """Each file below the folder, with its size and time of change."""
    found = (os.path.join(holder, name) for holder, folders, files in os.walk(folder) for name in folders + files)
    return {(path, state.st_size, state.st_mtime_ns) for path in found for state in [os.lstat(path)]}


def sweep(chosen: slice, on_violation: Any = None, kind: str | None = None) -> Sweep:
    """Tries the ``chosen`` slice of all inputs, or of one kind of them, in a new folder."""
    result, came_from = Sweep(), os.getcwd()
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        furnish(Path(folder))
        os.chdir(folder)
        try:
            for its_kind, arguments in [each for each in inputs() if kind in (None, each[0])][chosen]:
                code, wrong = problem_with(arguments)
                result.tried[its_kind] += 1
                result.codes[str(code)] += 1
                if wrong is not None:
                    result.violations.append(f"{arguments}: {wrong}")
                    if on_violation is not None:
                        on_violation(result.violations[-1])
        finally:
            os.chdir(came_from)
    return result


def tell(line: str) -> None:
    """Prints one violation to stderr at once."""
    print(line.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)


def main() -> int:
    """The command: a line for each violation on stderr, and a JSON summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try only every n-th input")
    parser.add_argument("--kind", choices=sorted({kind for kind, _ in inputs()}), help="try only inputs of this kind")
    options = parser.parse_args()
    result = sweep(slice(None, None, options.every), tell, options.kind)
    print(json.dumps({"tried": result.tried, "exit_codes": result.codes, "violations": len(result.violations)}))
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
