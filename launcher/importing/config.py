"""A run's config from a model folder's config.json."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.config import DataConfig
from launcher.config.ranges import ranges
from launcher.config.rules import Precision, check, uneven_expert_widths
from launcher.config.tree import RunConfig, TrainConfig
from launcher.console import tell
from launcher.errors import UserError
from launcher.importing.folder import CONFIG_JSON
from modeling.config import ModelConfig
from modeling.families.config_json import REMEDY, InexpressibleConfig, from_config_json
from modeling.families.family import family_of
from modeling.families.qwen2 import CHUNKS, longest_in_chunks
from modeling.families.rope_json import alpha_of, table_of
from modeling.families.text_model import text_model
from modeling.families.values import shown
from modeling.rope_scaling import LongRopeScaling
from parallel.checkpoint.schema import shorten

PRECISIONS: dict[str, Precision] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
RUNS_DIR = Path("runs")


def read_text_model(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the text model (``modeling.families.text_model``). Raises UserError where it is unusable."""
    try:
        return text_model(content)
    except InexpressibleConfig as error:
        raise UserError([f"{path}/{line}" for line in error.problems]) from None


def read_model(path: Path, content: Mapping[str, Any]) -> tuple[ModelConfig, int]:
    """The model config in config.json's ``content``, and its longest sequence. ``path`` is the folder, for messages.

    Raises UserError with a line for each key that cannot be used.
    """
    try:
        model = from_config_json(content)
    except InexpressibleConfig as error:
        raise UserError([f"{path}/{line}" for line in error.problems]) from None
    most = ranges(DataConfig)["seq_len"].maximum
    shortest = 1 if model.mtp is None else max(1, int(min(1 + model.mtp.depth, most)))  # depth has its own range check
    broken = check(
        RunConfig(model=model, data=DataConfig(seq_len=shortest), train=TrainConfig(precision="fp32")),
        1,
    )
    if broken:
        told = (line.rpartition("; ")[0] or line for line in broken)
        raise UserError([f"{path / CONFIG_JSON}: {line}; {REMEDY}" for line in told])
    longest = read_seq_len(path, content)
    chunk = longest_chunk(path, content)
    if chunk is not None and chunk < longest:
        told = f"{CHUNKS} is not computed, as transformers' class ignores it"
        tell(f"{path / CONFIG_JSON}: {told}: it would change nothing up to data.seq_len={chunk}")
        longest = chunk
    key, table = table_of(content)
    if alpha_of(table, family_of(model.family)) is not None:
        told = f"{key} has alpha={shown(table['alpha'])}, which stretches the base of the frequencies"
        tell(f"{path / CONFIG_JSON}: {told}: it is read as model.rope_theta={model.rope_theta} without a scaling")
    if isinstance(model.rope_scaling, LongRopeScaling):  # beyond it, factors depend on a pass's longest sequence
        return model, min(longest, model.rope_scaling.original_seq_len)
    return model, longest


def longest_chunk(path: Path, content: Mapping[str, Any]) -> int | None:
    """The longest sequence that dual chunk attention computes as plain attention; None where config.json has none.

    Raises UserError where its table cannot be used.
    """
    try:
        return longest_in_chunks(content)
    except ValueError as error:
        raise UserError([f"{path / CONFIG_JSON}: {error}; {REMEDY}"]) from None


def read_seq_len(path: Path, content: Mapping[str, Any]) -> int:
    """The model's longest sequence, at most the largest data.seq_len; transformers' default where it is left out.

    Raises UserError where the key is no whole number of at least 1.
    """
    limits, family = ranges(DataConfig)["seq_len"], family_of(content["model_type"])
    told = {family.aliases.get(key, key): value for key, value in content.items()} | dict(content)
    key = family.length_key
    value = told.get(key, family.defaults.get(key))
    if value is None and key not in told:
        from transformers import AutoConfig  # takes seconds to import

        value = getattr(AutoConfig.for_model(content["model_type"]), key)
    if type(value) is not int or value < limits.minimum:
        rule = "must be a whole number of at least 1"
        raise UserError([f"{path / CONFIG_JSON}: {key}={shorten(value)} {rule}; {REMEDY}"])
    return min(value, int(limits.maximum))


def run_config(
    model: ModelConfig, seq_len: int, dtype: str, out: Path, tokenizer: str | None, *, adds_bos: bool
) -> RunConfig:
    """The config of the run directory ``out``: the model, its sequences, its tokenizer, and its weights' precision.

    ``adds_bos`` says whether that tokenizer begins each text with BOS. ``dtype`` is that of the files' weights, as
    safetensors names it: F32, BF16 or F16. A model with experts whose widths do not allow 16 bits gets fp32.
    """
    precision = PRECISIONS[dtype]
    if any(uneven_expert_widths(model, precision)):
        precision = "fp32"
    name = out.absolute().name
    return RunConfig(
        name=name if "\\" not in name else RunConfig.name,
        run_dir=None if out == RUNS_DIR / name else str(out),
        model=model,
        data=DataConfig(seq_len=seq_len, tokenizer=tokenizer, add_bos=adds_bos),
        train=dataclasses.replace(TrainConfig(), precision=precision),
    )
