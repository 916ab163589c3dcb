"""Ten documents of noise among the quickstart's text: how many does `roundtable blame` put first? Prints one JSON line.

    python benchmarks/poison.py [--keep FOLDER]

Python's standard library, copied, and among its files 100 of noise: 300 random bytes each, as base64 in lines of 60.
The quickstart's config trains its 200 steps on them (in fp32 where the demo does) in sequences of 1024 tokens, since a
document of noise is longer than its usual 256, with a checkpoint every ten. Of the noise the first ten documents (by
number) are taken that one step alone saw, whole, after step 100; blame is asked about each one's step. ``first`` counts
those that it ranks first in their batch, ``ranks`` has each one's place, ``of`` the documents in that batch.

This setting was written down, and committed, before any of its figures was seen: blame's order was chosen with other
runs in view (docs/blame.md). (A first setting, of 40 documents and sequences of 256, had no document that a step saw
whole: it asked nothing.) Half an hour to an hour on two cores.
"""

import argparse
import base64
import json
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from launcher.commands.demo import precision

N_NOISE, N_BYTES, LINE = 100, 300, 60
N_ASKED, TRAINED = 10, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    keeps = "A folder that keeps the run; one that was interrupted there goes on from its last checkpoint."
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help=keeps)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        noise = plant(folder / "text")
        run = folder / "run"
        train(folder, run)
        asked = seen_late_and_whole(run, noise)
        if len(asked) < N_ASKED:
            raise SystemExit(f"only {len(asked)} documents of noise were seen whole after step {TRAINED}")
        found = [place_of(run, step, document) for document, step in asked[:N_ASKED]]
    ranks = [rank for rank, _ in found]
    result = {"benchmark": "poison", "first": ranks.count(1), "asked": N_ASKED, "ranks": ranks}
    print(json.dumps({**result, "of": [n_documents for _, n_documents in found]}))


def plant(folder: Path) -> list[str]:
    """Copies the library's text to ``folder`` with the noise among it; returns the first line of each noise document.

    Files that exist are not written again, since `prepare` would take them for other files.
    """
    if not folder.exists():
        begun = folder.with_name("begun")
        left_out = shutil.ignore_patterns("site-packages", "encoded_modules", "__pycache__")
        shutil.copytree(sysconfig.get_paths()["stdlib"], begun, ignore=left_out, dirs_exist_ok=True)
        begun.rename(folder)
    draw, first_lines = random.Random(0), []
    homes = sorted(path for path in folder.rglob("*") if path.is_dir())
    for number in range(N_NOISE):
        text = base64.b64encode(draw.randbytes(N_BYTES)).decode()
        lines = [text[begin : begin + LINE] for begin in range(0, len(text), LINE)]
        path = draw.choice(homes) / f"noise_{number}.py"
        if not path.exists():
            path.write_text("\n".join(lines) + "\n")
        first_lines.append(lines[0])
    return first_lines


def train(folder: Path, run: Path) -> None:
    """Trains the quickstart's config on ``folder``'s text, in the run directory ``run``."""
    excluded = ["**/badsyntax_pep3120.py", "**/test_source_encoding.py"]
    sources = [{"path": f"{folder / 'text'}/**/*.py", "exclude": excluded}]
    overrides = [
        f"data.sources={json.dumps(sources)}",
        f"data.token_dir={folder / 'tokens'}",
        f"run_dir={run}",
        "data.seq_len=1024",
        "checkpoint.every_steps=10",
        "checkpoint.keep_last=1000",
        "metrics.wandb.mode=disabled",
        *precision(),
    ]
    config = Path(__file__).parent.parent / "configs/quickstart.yaml"
    roundtable("train", str(config), "--ranks", "2", *overrides)


def seen_late_and_whole(run: Path, noise: list[str]) -> list[tuple[str, int]]:
    """(name, step) of each noise document that only one step saw, whole, and after step TRAINED."""
    found = []
    for first_line in noise:
        places = answer("data", "where", str(run), "--text", first_line, "--json")["places"]
        for document in {place["document"] for place in places}:
            (whole,) = answer("data", "where", str(run), "--document", document, "--json")["places"]
            match whole["seen"]:
                case [{"step": step, "tokens": tokens}] if step > TRAINED and tokens == whole["tokens"]:
                    found.append((document, step))
    return found


def place_of(run: Path, step: int, document: str) -> tuple[int, int]:
    """Blame's rank of ``document`` among those of the step's batch, from 1 on; and the number of these."""
    rows = answer("blame", str(run), "--step", str(step), "--json")["documents"]
    names = [row["document"] for row in rows]
    return names.index(document) + 1, len(names)


def answer(*arguments: str) -> Any:
    """Runs a `roundtable` command; returns the JSON that it prints."""
    return json.loads(roundtable(*arguments).splitlines()[-1])


def roundtable(*arguments: str) -> str:
    """Runs a `roundtable` command; returns its standard output."""
    command = [sys.executable, "-m", "launcher", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
