"""Runs the blocks of a Markdown page. A marker after the language of a fence says what to do with its text:

    ```yaml file=own.yaml      the text becomes that file in the page's folder
    ```sh run                  bash runs the text there, and ends at the first command that fails
    ```text shown              lines that the last run printed, in this order; … stands for anything within a line

Other fences are ignored. All blocks of a page share one folder, which is empty at first.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the marker after it, its text, and the line of the page where it begins."""

    language: str
    marker: str
    text: str
    line: int


def blocks_of(page: str) -> list[Block]:
    """Every fence of a page, in order."""
    found = []
    for match in FENCE.finditer(page):
        language, _, marker = match["info"].partition(" ")
        text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        found.append(Block(language, marker, text, page.count("\n", 0, match.start()) + 1))
    return found


def run_page(page: str, folder: Path, timeout: float = 600) -> int:
    """Runs the page's blocks in ``folder``; returns the number of blocks that were run.

    Raises AssertionError, with the line's number, where a command fails or expected output is missing.
    """
    printed, count = "", 0
    for block in blocks_of(page):
        if block.marker.startswith("file="):
            (folder / block.marker.removeprefix("file=")).write_text(block.text)
        elif block.marker == "run":
            printed, count = run_shell(block, folder, timeout), count + 1
        elif block.marker == "shown":
            missing = first_missing(block.text, printed)
            assert missing is None, f"line {block.line}: {missing!r} is not printed, or not in this order:\n{printed}"
        else:
            assert not block.marker, f"line {block.line}: {block.marker!r} is no marker of a block"
    return count


def run_shell(block: Block, folder: Path, timeout: float) -> str:
    """Runs a block with bash; returns what it printed to stdout and stderr. Raises AssertionError where it fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"line {block.line} ends with {done.returncode}:\n{block.text}\n{done.stdout}"
    return done.stdout


def first_missing(wanted: str, printed: str) -> str | None:
    """The first line of ``wanted`` that ``printed`` lacks after the lines before it; None where all are there."""
    at = 0
    for line in wanted.splitlines():
        pattern = r"\s+".join(r"\S.*".join(map(re.escape, word.split("…"))) for word in line.split())
        match = re.compile(pattern).search(printed, at)
        if match is None:
            return line
        at = match.end()
    return None


def commands_of(page: str) -> list[tuple[int, list[str]]]:
    """(line, words) of each `roundtable ...` command: in a shell block, indented by four spaces, or in a sentence."""
    texts = [(block.line, block.text) for block in blocks_of(page) if block.language in ("sh", "bash", "")]
    outside = FENCE.sub(lambda match: "\n" * match[0].count("\n"), page)
    texts += [
        (outside.count("\n", 0, match.start()), match[1] or match[2])
        for match in re.finditer(r"^ {4}(.*)$|`(?=roundtable )([^`]+)`", outside, re.MULTILINE)
    ]
    found = []
    for begin, text in texts:
        for number, line in enumerate(re.sub(r"\\\n\s*", " ", text).splitlines(), start=1):
            match = re.match(r"(?:\$ )?(?:srun [^|;]*?)?roundtable (.*)", line.strip())
            if match:
                found.append((begin + number, match[1]))
    return [(line, words_of(command)) for line, command in found]


def words_of(command: str) -> list[str]:
    """The words of a command up to a pipe, redirection, ellipsis, comment, or remark after several spaces."""
    command = re.split(r"\s{3,}|\s#|\s[|>;&]|…|\.\.\.", command)[0]
    return shlex.split(command.replace("[", " ").replace("]", " ") if "=" not in command else command)
