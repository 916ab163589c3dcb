"""Keys of layers that a config.json leaves out mean what the class takes: experts, windows, rotation, bases."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_folders import config_json_of
from launcher.config.families import check_family
from modeling.config import FamilyName
from modeling.families.config_json import LISTS, from_config_json
from modeling.families.family import family_of
from modeling.rope import Rotary
from small_models import example_config


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    ("listed", "step", "fields"),
    [
        ([], 1, (0, 1, ())),
        ([1, 0, 1], 1, (2, 1, ())),
        ([2, 0, 9], 1, (1, 1, (2,))),
        ([], 2, (0, 2, ())),
        ([0, 3], 2, (0, 2, (3,))),
        ([0, 1, 2], 2, (2, 2, ())),
        ([1, 3], 2, (4, 2, ())),
        ([2], 5, (4, 1, ())),
    ],
)
def test_layers_without_experts_are_those_of_the_class(family: FamilyName, listed, step, fields) -> None:
    """Of four layers: each is told once, by the field that says it shortest, as the class builds them."""
    changes = {"num_hidden_layers": 4, "mlp_only_layers": listed, "decoder_sparse_step": step}
    content = {**config_json_of(example_config(family)), **changes}
    content.pop("layer_types", None)
    config = from_config_json(content)
    assert config.moe is not None and not [*config.problems()]
    assert (config.moe.n_dense_layers, config.moe.every_n_layers, config.moe.dense_layers) == fields
    again = from_config_json(config_json_of(config))
    assert (
        again.moe == config.moe
        and config_json_of(again)["mlp_only_layers"] == config_json_of(config)["mlp_only_layers"]
    )
    assert all((layer + 1) % fields[1] == 0 for layer in config_json_of(config)["mlp_only_layers"])
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content), trust_remote_code=False)
    has_router = [hasattr(layer.mlp, "gate") for layer in theirs.model.layers]
    assert [config.is_moe_layer(layer) for layer in range(4)] == has_router
    assert config.n_moe_layers == sum(has_router)


@pytest.mark.parametrize(
    ("kinds", "fields"),
    [
        (None, (1, ())),
        (["sparse"] * 4, (0, ())),
        (["sparse", "dense", "sparse", "sparse"], (0, (1,))),
        (["dense", "dense", "sparse", "dense"], (2, (3,))),
        (["dense"] * 4, (4, ())),
    ],
)
def test_layers_without_experts_of_glm4_moe_lite_are_those_of_the_class(kinds, fields) -> None:
    """Its list counts, whatever the number of leading layers beside it says, which is written for other programs."""
    content = {**config_json_of(example_config("glm4_moe_lite")), "num_hidden_layers": 4, "mlp_layer_types": kinds}
    config = from_config_json({**content, "first_k_dense_replace": 3})
    assert config.moe is not None and not [*config.problems()]
    assert (config.moe.n_dense_layers, config.moe.dense_layers) == fields
    assert config_json_of(config)["first_k_dense_replace"] == fields[0]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content), trust_remote_code=False)
    assert [config.is_moe_layer(layer) for layer in range(4)] == [
        hasattr(layer.mlp, "gate") for layer in theirs.model.layers
    ]


@pytest.mark.parametrize(
    ("family", "changes", "dense"),
    [
        ("exaone_moe", {}, [0]),
        ("exaone_moe", {"first_k_dense_replace": 2}, [0, 1]),
        ("exaone_moe", {"first_k_dense_replace": 10**10}, [0, 1, 2]),
        ("exaone_moe", {"first_k_dense_replace": -1}, []),
        ("exaone_moe", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, [1]),
        ("mellum", {}, []),
        ("mellum", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, [1]),
        ("hy_v3", {}, [0]),
        ("hy_v3", {"mlp_layer_types": ["dense", "sparse", "dense"]}, [0, 2]),
    ],
)
def test_dense_layers_are_those_of_the_class(family: FamilyName, changes: dict[str, Any], dense: list[int]) -> None:
    """Of three layers."""
    lists = dict.fromkeys({*LISTS} & family_of(family).keys.keys())
    content = {**config_json_of(example_config(family)), **lists, "num_hidden_layers": 3, **changes}
    config = from_config_json(content)
    assert not [*config.problems(), *check_family(config)]
    assert [layer for layer in range(3) if not config.is_moe_layer(layer)] == dense
    assert from_config_json(config_json_of(config)) == config
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content), trust_remote_code=False)
    assert [layer for layer in range(3) if not hasattr(theirs.model.layers[layer].mlp, "gate")] == dense


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, 1.0),
        ({"rotary_dim": None}, 1.0),
        ({"rotary_dim": 4}, 0.25),
        ({"rotary_dim": 4, "rope_parameters": {"rope_theta": 100.0}}, 0.25),
        ({"rotary_dim": 4, "partial_rotary_factor": 0.5}, 0.5),
        ({"rotary_dim": 4, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}, 0.5),
    ],
)
def test_turning_channels_of_minimax_m2_are_those_of_the_class(changes: dict[str, Any], part: float) -> None:
    """Of heads of 16 channels: the published files tell their number alone."""
    content = config_json_of(example_config("minimax_m2"))
    assert content["rotary_dim"] == 16 * content["partial_rotary_factor"]
    for key in ("rotary_dim", "partial_rotary_factor", "rope_parameters"):
        del content[key]
    content |= changes
    assert AutoConfig.for_model(**content).rope_parameters.get("partial_rotary_factor", 1.0) == part
    assert from_config_json(content).rope_fraction == part


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("ministral", {"sliding_window": 5}),
        ("ministral", {"sliding_window": None}),
        ("granitemoe_swa", {}),
        ("granite_swa", {}),
        ("vaultgemma", {}),
        ("mellum", {}),
        ("exaone_moe", {}),
        ("exaone_moe", {"sliding_window_pattern": 2}),
        ("exaone4", {}),
        ("exaone4", {"sliding_window_pattern": 2}),
        ("exaone4", {"sliding_window_pattern": 1}),
    ],
)
def test_windows_that_are_not_told_are_those_of_the_class(family: FamilyName, changes: dict[str, Any]) -> None:
    """Of five layers, where every list of what layers are is left out."""
    lists = dict.fromkeys({*LISTS} & family_of(family).keys.keys())
    content = {**config_json_of(example_config(family)), **lists, "num_hidden_layers": 5, **changes}
    config = from_config_json(content)
    kinds = ["full_attention" if config.window_of(layer) is None else "sliding_attention" for layer in range(5)]
    assert kinds == AutoConfig.for_model(**content).layer_types


@pytest.mark.parametrize(
    ("family", "window", "full", "turning"),
    [
        ("exaone4", 5, (1,), [True, False, True]),
        ("exaone4", 5, (), [True, True, True]),
        ("exaone4", 5, (0, 1, 2), [False, False, False]),
        ("exaone4", None, (0, 1, 2), [True, True, True]),
        ("exaone_moe", 5, (1,), [True, False, True]),
        ("exaone_moe", 5, (0, 1, 2), [False, False, False]),
    ],
)
def test_layers_that_turn_are_those_of_the_class(
    family: FamilyName, window: int | None, full: tuple[int, ...], turning: list[bool]
) -> None:
    """EXAONE's turn under a window, and everywhere where there is no window at all; one that no layer has stops all."""
    lists = dict.fromkeys({*LISTS} & family_of(family).keys.keys())
    types = {"layer_types": ["full_attention" if layer in full else "sliding_attention" for layer in range(3)]}
    more = {**types, "num_hidden_layers": 3, "sliding_window": window}
    content = {**config_json_of(example_config(family)), **lists, **more, "sliding_window_pattern": "LLLG"}
    config = from_config_json(content)
    assert not [*config.problems(), *check_family(config)]
    assert [config.rope_dim_of(layer) > 0 for layer in range(3)] == turning
    assert from_config_json(config_json_of(config)) == config
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content), trust_remote_code=False)
    attentions = [layer.self_attn for layer in theirs.model.layers]
    assert [each.sliding_window is None or each.is_sliding for each in attentions] == turning


@pytest.mark.parametrize("family", ["granite_swa", "granitemoe_swa"])
@pytest.mark.parametrize(
    ("listed", "base", "still"),
    [
        (None, 123.0, ()),
        ([500, 500.0, 500.0], 500.0, ()),
        ([0, 500.0, 500.0], 500.0, (0,)),
        ([0, 0.0, 0], 123.0, (0, 1, 2)),
    ],
)
def test_bases_of_layers_are_those_of_the_class(family: FamilyName, listed, base: float, still) -> None:
    """Of three layers: a base of 0 is that of a layer in which nothing turns, the others count before rope_theta."""
    more = {"num_hidden_layers": 3, "layer_types": None, "layer_rope_theta": listed}
    content = {**config_json_of(example_config(family, rope_theta=123.0)), **more}
    config = from_config_json(content)
    assert not [*config.problems(), *check_family(config)]
    assert (config.rope_theta, config.nope_layers) == (base, still)
    assert from_config_json(config_json_of(config)) == config
    bases = [0.0 if layer in still else base for layer in range(3)]
    assert AutoConfig.for_model(**content).layer_rope_theta == bases


@pytest.mark.parametrize(("window", "first"), [(4096, 62), (5, 0), (5, 1), (None, 1)])
def test_windows_of_dots1_are_those_of_the_class(window: int | None, first: int) -> None:
    content = {**config_json_of(example_config("dots1")), "layer_types": None, "sliding_window": window}
    content |= {"num_hidden_layers": 3, "max_window_layers": first}
    config = from_config_json(content)
    kinds = ["full_attention" if config.window_of(layer) is None else "sliding_attention" for layer in range(3)]
    assert kinds == AutoConfig.for_model(**content).layer_types


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
@pytest.mark.parametrize(
    "told",
    [
        {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 4.0}},
        {"rope_scaling": {"rope_type": "dynamic", "alpha": 3, "factor": 1.0}, "rope_theta": 700.0},
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 0.5, "factor": 2.0, "rope_theta": 700.0, "mscale": 1.0}},
        {"rope_scaling": {"type": "dynamic", "alpha": 0, "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "alpha": None, "factor": 4.0}},
    ],
    ids=str,
)
def test_a_fixed_alpha_stretches_the_base_as_in_the_class(family: FamilyName, told: dict[str, Any]) -> None:
    """Without an alpha, or with one of 0, the base grows with a pass beyond the longest sequence."""
    content = {**config_json_of(example_config(family)), "max_position_embeddings": 20}
    content = {key: content[key] for key in content.keys() - {"rope_parameters", "rope_theta"}} | told
    config = from_config_json(content)
    assert not [*config.problems(), *check_family(config)] and from_config_json(config_json_of(config)) == config
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content), trust_remote_code=False).model.rotary_emb
    rotary = Rotary(config.rope_dim, config.rope_theta, config.rope_scaling)
    for length in (20, 90):  # the second is beyond max_position_embeddings
        theirs(torch.zeros(1), torch.arange(length)[None])
        torch.testing.assert_close(rotary.frequencies(torch.device("cpu"), length), theirs.inv_freq, rtol=1e-6, atol=0)
