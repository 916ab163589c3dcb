"""Numbers of a config.json that follow from others where they are left out, or that say what we say in another way."""

from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_folders import config_json_of
from modeling.config import FamilyName
from modeling.families.config_json import from_config_json
from small_models import example_config


@pytest.mark.parametrize(
    ("family", "changes", "ours", "theirs"),
    [
        ("youtu", {"initializer_range": None}, "init_std", "initializer_range"),
        ("youtu", {"initializer_range": None, "hidden_size": 96}, "init_std", "initializer_range"),
        ("youtu", {"initializer_range": 0.5, "hidden_size": 96}, "init_std", "initializer_range"),
        ("hyperclovax", {"head_dim": None}, "head_dim", "head_dim"),
        ("hyperclovax", {"attention_multiplier": 0.25}, "score_scale", "attention_multiplier"),
    ],
)
def test_numbers_that_follow_from_others_are_those_of_the_class(
    family: FamilyName, changes: dict[str, Any], ours: str, theirs: str
) -> None:
    content = {**config_json_of(example_config(family)), **changes}
    assert getattr(from_config_json(content), ours) == getattr(AutoConfig.for_model(**content), theirs)


@pytest.mark.parametrize("number", [0.125, 0.9, 1.9, 3.0, 0.013, 1e-6, 1e6, 55.5])
def test_a_factor_of_the_logits_is_the_same_after_an_import_and_an_export(number: float) -> None:
    """HyperCLOVA X multiplies by what we divide by."""
    content = config_json_of(example_config("hyperclovax")) | {"logits_scaling": number}
    assert config_json_of(from_config_json(content))["logits_scaling"] == number
    config = example_config("hyperclovax", logit_divisor=number)
    assert from_config_json(config_json_of(config)).logit_divisor == number


@pytest.mark.parametrize("placement", ["pre", "both"])
def test_norms_after_blocks_are_those_of_the_class(placement: Literal["pre", "both"]) -> None:
    config = example_config("hyperclovax", norm_placement=placement)
    content = config_json_of(config)
    assert from_config_json(content).norm_placement == placement
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content), trust_remote_code=False)
    assert hasattr(theirs.model.layers[0].post_norm1, "weight") == (placement == "both")
