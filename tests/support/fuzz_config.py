"""Fuzz target: any bytes as a config file, which must give a config or plain error lines."""

from pathlib import Path

from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.rules import check as check_rules
from launcher.errors import UserError

SEEDS = (
    "name: a\nrun_dir: null\nseed: 3\n",
    "model: {family: mixtral, d_model: 64, n_heads: 2, n_kv_heads: 1, moe: {n_experts: 4, balance: {name: none}}}\n",
    "train:\n  steps: 10\n  precision: fp32\noptimizer: {name: sgd, lr: 3e-4}\nschedule: {name: wsd, decay_steps: 2}\n",
    'data:\n  sources:\n    - &a {path: "x.txt", weight: 2.5, exclude: ["*.md"]}\n    - {<<: *a, path: y}\n    - *a\n',
    "parallel: {tp: 2, pp: 2, pipeline: {name: interleaved, n_chunks: 2, layers: [2, 2, 2, 2]}, zero: 0}\n",
    "slurm: {nodes: 2, environment: [A=b, HF_TOKEN], modules: [cuda/12.8], container: 'docker://u@h#i:1'}\n",
    "%YAML 1.2\n--- # a comment\nmetrics: {wandb: {mode: offline}}\ncheckpoint: !!map {every_steps: 0x10}\n...\n",
)  # fmt: skip
LONGEST_LINE = 2000  # characters; a message names a key and a value, each shortened


def seeds() -> list[bytes]:
    """Small configs that use most features of YAML and of the config; each is accepted, or refused by a rule."""
    return [text.encode() for text in SEEDS]


def check(data: bytes, folder: Path) -> bool:
    """Whether a config file of these bytes is accepted; asserts that its dump then loads as the same config."""
    path = folder / "fuzzed.yaml"
    path.write_bytes(data)
    try:
        config = load_config(path)
    except UserError as error:
        assert_plain(error.problems)
        return False
    problems = check_rules(config, 2)
    assert_plain(problems)
    path.write_text(dump_config(config))
    assert load_config(path) == config
    return not problems


def assert_plain(lines: list[str]) -> None:
    """Asserts that each problem is one printable, not too long line."""
    for line in lines:
        assert line.isprintable(), ascii(line)
        assert 0 < len(line) <= LONGEST_LINE, line
