"""docs/tutorials/coming_from.md: each of our keys is one, and each name of `transformers` is one of its classes'."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

from launcher.config.schema import leaf_keys
from launcher.config.tree import RunConfig
from modeling.expert_layers import has_experts
from modeling.moe_config import MoEConfig

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "coming_from.md").read_text()
KEYS = set(leaf_keys(RunConfig))


def rows(page: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """(heading of the column, their names, our keys) of each row of a page's tables."""
    heading = ""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) != 3 or set(cells[0]) <= {"-"}:
            continue
        if cells[1] == "ours":
            heading = cells[0]
        else:
            yield heading, re.findall(r"`([^`]+)`", cells[0]), re.findall(r"`([^`]+)`", cells[1])


def unknown_keys(page: str) -> list[str]:
    return [key for _, _, ours in rows(page) for key in ours if key not in KEYS]


def test_our_keys_are_keys():
    assert unknown_keys(PAGE) == []
    assert len({key for _, _, ours in rows(PAGE) for key in ours}) > 70


def test_planted_a_key_that_is_none_is_seen():
    assert unknown_keys("| Megatron-LM | ours | note |\n|---|---|---|\n| `--a` | `train.stepz`, `seed` | |\n") == [
        "train.stepz"
    ]


def test_each_project_has_its_rows():
    headings = [heading for heading, _, _ in rows(PAGE)]
    assert {name: headings.count(name) > 10 for name in headings} == dict.fromkeys(
        ("Megatron-LM", "torchtitan", "TrainingArguments", "config.json"), True
    )


def test_the_names_of_transformers_are_there():
    from transformers import Qwen3Config, Qwen3MoeConfig, TrainingArguments

    arguments = {field.name for field in dataclasses.fields(TrainingArguments)}
    configs = (Qwen3MoeConfig(), Qwen3Config())
    missing = [
        name
        for heading, theirs, _ in rows(PAGE)
        for name in theirs
        if (heading == "TrainingArguments" and name not in arguments)
        or (heading == "config.json" and not any(hasattr(config, name) for config in configs))
    ]
    assert missing == []


def test_megatrons_layers_with_experts_are_ours():
    """Megatron's pattern is 1 where i % N == 0: every other layer from the first one on."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `--moe-layer-freq`"))
    (listed,) = re.findall(r"model\.moe\.dense_layers=(\[[\d,]+\])", row)
    moe = MoEConfig(n_experts=4, dense_layers=tuple(json.loads(listed)))
    assert [has_experts(moe, layer) for layer in range(6)] == [layer % 2 == 0 for layer in range(6)]
