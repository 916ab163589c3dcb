"""Corpora for tests of data cleaning, and a preparation in a process that can be killed at random moments."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from byte_tokenizer import save_byte_tokenizer
from data.config import DataConfig, SourceConfig

VOCAB = 257
HOSTILE = "<script>window.stolen=1</script><img src=x onerror=window.stolen=1>\x1b[31m\u202e\u2028 </script>"
COMMON = ["the", "of", "and", "to", "that", "with", "have", "be", "a", "in", "is", "was", "for", "on", "as", "at", "by"]


def make_texts(n: int, seed: int = 0, n_words: int = 80) -> list[str]:
    """Texts that Gopher's quality rules keep: sentences of made-up words and common ones."""
    draw = random.Random(seed)
    vocabulary = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 9))) for _ in range(3000)]
    texts = []
    for _ in range(n):
        words = [draw.choice(COMMON) if draw.random() < 0.3 else draw.choice(vocabulary) for _ in range(n_words)]
        lines = [" ".join(words[i : i + 16]).capitalize() + "." for i in range(0, n_words, 16)]
        texts.append("\n".join(lines))
    return texts


def edited(text: str, n: int = 1) -> str:
    """The text with its n middle words replaced."""
    words = text.split(" ")
    middle = len(words) // 2
    words[middle : middle + n] = ["replaced"] * n
    return " ".join(words)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tokenizer_in(folder: Path) -> str:
    save_byte_tokenizer(folder)
    return str(folder)


def config_of(paths: list[Path], tokenizer: str | None, token_dir: Path, **changes) -> DataConfig:
    fields = {"heldout_fraction": 0.1, "shard_bytes": 8000, "workers": 2, "seq_len": 16} | changes
    sources = tuple(SourceConfig(path=str(path)) for path in paths)
    return DataConfig(**({"sources": sources, "tokenizer": tokenizer, "token_dir": str(token_dir)} | fields))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


SCRIPT = """
import json, sys
from pathlib import Path
from launcher.config.load import load_config
from data.prepare import prepare
if __name__ == "__main__":
    prepare(load_config(sys.argv[1]).data, vocab_size=257)
"""


class Preparation:
    """`prepare` in a process of its own, which can be killed with all its workers."""

    def __init__(self, folder: Path, config: DataConfig) -> None:
        self.script, self.config = folder / "prepare.py", folder / "config.yaml"
        self.script.write_text(SCRIPT)
        tree = {"name": "x", "model": {"vocab_size": VOCAB}, "data": asdict(config)}
        self.config.write_text(json.dumps(tree))  # JSON is YAML

    def run(self, seconds: float | None) -> bool:
        """Runs it; returns whether it ended by itself within ``seconds`` (None: no limit), else it was killed.

        Raises AssertionError where its workers outlive it, or it fails.
        """
        command = [sys.executable, str(self.script), str(self.config)]
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
        try:
            _, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            until = time.monotonic() + 60
            while time.monotonic() < until:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 0)
                    time.sleep(0.02)
                    continue
                return False
            raise AssertionError("workers outlived their parent") from None
        assert process.returncode == 0, said.decode()
        return True


def kill_at_random(folder: Path, config: DataConfig, n_kills: int, seed: int) -> int:
    """Kills the preparation ``n_kills`` times at random moments; returns how often it ended before its kill.

    Each run that ends must have written the same bytes as an undisturbed one. ``config.token_dir`` must not exist yet.
    Raises AssertionError where bytes differ.
    """
    draw, token_dir = random.Random(seed), Path(config.token_dir)
    preparation = Preparation(folder, config)
    started = time.monotonic()
    assert preparation.run(None)
    seconds = time.monotonic() - started
    whole = contents(token_dir)
    shutil.rmtree(token_dir)
    n_done = 0
    for _ in range(n_kills):
        while preparation.run(draw.uniform(0.3, 1.0) * seconds):  # ended before it was killed
            assert contents(token_dir) == whole
            shutil.rmtree(token_dir)
            n_done += 1
    assert preparation.run(None)
    assert contents(token_dir) == whole
    return n_done
