"""config.json read: what we write comes back, what is left out is transformers' default, what is beyond us is told."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from hf_folders import config_json_of
from launcher.config.families import check_family
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.counts import count_parameters
from modeling.expert_layers import told_once
from modeling.families import base_keys
from modeling.families.config_json import LISTS, InexpressibleConfig, SpecialTokens, from_config_json, to_config_json
from modeling.families.family import TRAINING_ONLY, family_of, field_defaults, section_types
from modeling.moe_config import BiasBalance, NoBalance
from modeling.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling
from refused_models import REFUSED
from rotating import some_fast
from small_models import configs, example_config

FEW = settings(max_examples=30, deadline=None, derandomize=True)
# What every config.json of Hugging Face's own files has besides.
OUTSIDE = {
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
# The published models: config.json as its file has it, and the number of parameters in the safetensors files (of
# DeepSeek-V3 without its module that predicts a second token, and the selection biases; of gpt-oss as its card has
# them, since the files have two weights of an expert in a byte).
ROWS = json.loads((Path(__file__).parents[1] / "data/published_models.json").read_text())
PUBLISHED: dict[str, dict[str, Any]] = {row["name"]: row for row in ROWS}
# Keys that the published files have, and the class does not know.
ELSEWHERE = {
    "afmoe": {"n_group", "num_expert_groups", "num_limited_groups", "route_norm", "score_func", "topk_group"},
    "deepseek_v2": {"moe_layer_freq", "scoring_func"},
    "deepseek_v3": {"moe_layer_freq", "scoring_func", "topk_method"},
    "dots1": {"moe_layer_freq", "scoring_func", "topk_method"},
    "glm4_moe_lite": {
        *("first_k_dense_replace", "moe_layer_freq", "num_nextn_predict_layers", "scoring_func", "topk_method"),
    },
    "gemma3_text": {"sliding_window_pattern"},  # the class has it as _sliding_window_pattern
    "phi3": {"attention_bias"},
    "gpt_neox": {"rotary_emb_base", "rotary_pct"},  # the class makes rope_parameters of them
    "gpt2": {"n_ctx", "n_inner"},  # n_inner is null there, and means 4 n_embd
    "gpt_oss": {"experts_per_token", "initial_context_length"},
    "granitemoe": {"position_embedding_type"},  # of version 4
    "minimax_m2": {
        *("qk_norm_type", "scoring_func", "shared_intermediate_size", "sliding_window", "use_qk_norm"),
        *("use_routing_bias", "rotary_dim"),
    },
    "granitemoeshared": {"position_embedding_type"},
    "ernie4_5_moe": {"moe_layer_end_index"},  # -1 is the last layer there
    "solar_open": {"first_k_dense_replace", "use_qk_norm"},
    # the class makes layer_types of it, and forgets it
    **{family: {"full_attention_interval"} for family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
}
# Keys that the class has null where they are left out, and then fails.
NULLS = {
    "deepseek_v2": ("num_experts_per_tok",),
    "dots1": ("num_experts_per_tok", "n_routed_experts", "n_shared_experts"),
    "nemotron": ("num_key_value_heads",),
}
# Keys that are null in the signature of the class, which then takes what follows from other keys.
FOLLOWING = {
    "hyperclovax": ("attention_multiplier",),
    "youtu": ("initializer_range", "embedding_initializer_range"),
}
MISSING = "tests/data/published_models.json has no row of {}: its family, name, config.json and number of parameters"
NAMED = [(family, name) for family in FAMILIES for name in family_of(family).published]


def published_row(name: str) -> dict[str, Any]:
    """What the published files of a model say."""
    assert name in PUBLISHED, MISSING.format(name)
    return PUBLISHED[name]


def problems(content: dict[str, Any]) -> list[str]:
    """The lines that reading ``content`` is refused with; none where it is a model."""
    try:
        from_config_json(content)
    except InexpressibleConfig as error:
        return error.problems
    return []


def computed(config: ModelConfig) -> ModelConfig:
    """The config without what shapes training alone, and without fields that mean nothing in its model."""
    moe = config.moe
    if moe is not None:
        bias = family_of(config.family).has_selection_bias
        moe = dataclasses.replace(moe, balance=BiasBalance() if bias else NoBalance(), z_loss=0.0)
        moe = told_once(moe, config.n_layers)
        if "moe.shared_d_ff" in family_of(config.family).told:
            moe = dataclasses.replace(moe, shared_d_ff=moe.shared_width or None)
    d_ff = moe.d_ff if moe is not None and "d_ff" not in family_of(config.family).keys.values() else config.d_ff
    told = family_of(config.family).told
    explicit: dict[str, Any] = {"d_head": config.head_dim if "d_head" in told else None}
    if "score_channels" in told:
        explicit["score_channels"] = config.score_channels or float(config.head_dim)
    if "score_scale" in told:
        explicit["score_scale"] = config.head_dim**-0.5 if config.score_scale is None else config.score_scale
    if "local_rope_theta" in told:
        explicit["local_rope_theta"] = config.local_rope_theta or config.rope_theta
    return dataclasses.replace(config, d_ff=d_ff, moe=moe, **explicit)


# Those whose keys are least alike; `make test-slow` draws configs of every family.
DRAWN = ("gpt2", "gemma3_text", "qwen2_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(("seq_len", "longest"), [(2048, 65536), (8192, 65536), (16384, 16384), (131072, 131072)])
def test_the_longest_sequence_under_llama3_s_scaling(seq_len: int, longest: int) -> None:
    """Beyond the original length it is what the model is trained on: Llama 3.1's and 3.2's own files say 131,072."""
    config = dataclasses.replace(example_config("llama"), rope_scaling=Llama3Scaling(factor=8.0, original_seq_len=8192))
    assert to_config_json(config, seq_len, SpecialTokens(), "float32")["max_position_embeddings"] == longest


@pytest.mark.parametrize("family", some_fast(FAMILIES, *DRAWN))
def test_config_there_and_back(family: FamilyName) -> None:
    @FEW
    @given(config=configs(family, predicts_further=True))
    def check(config: ModelConfig) -> None:
        assert from_config_json(config_json_of(config)) == computed(config)

    check()


@pytest.mark.parametrize("family", some_fast(FAMILIES, *DRAWN))
def test_what_transformers_saves_is_read(family: FamilyName, tmp_path) -> None:
    """Its class writes what differs from its defaults, under names of its own."""

    @FEW
    @given(config=configs(family, predicts_further=True))
    def check(config: ModelConfig) -> None:
        AutoConfig.for_model(**config_json_of(config)).save_pretrained(tmp_path)
        assert from_config_json(json.loads((tmp_path / "config.json").read_text())) == computed(config)

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_the_class(family: FamilyName) -> None:
    """A key left out means what it means in transformers' class."""
    theirs = AutoConfig.for_model(family)
    told = family_of(family)
    for key in {*told.keys, *told.constants} - {"head_dim", "qk_head_dim"} - ELSEWHERE.get(family, set()):
        ours = told.defaults.get(key, told.constants.get(key))
        if key in LISTS or key in FOLLOWING.get(family, ()):
            continue  # follows from others: the two configs below
        if key == "sliding_window" and not getattr(theirs, "use_sliding_window", True):
            continue  # the class has dropped it already
        if ours is None and key not in NULLS.get(family, ()):
            ours = {"num_key_value_heads": theirs.num_attention_heads, "mlp_only_layers": []}.get(key)
        assert getattr(theirs, key) == ours, key
    if "d_head" in told.told and told.defaults["head_dim"] is None:
        assert getattr(theirs, "head_dim", None) in (None, theirs.hidden_size // theirs.num_attention_heads)
    if told.turns:
        rope = {"rope_theta": told.defaults["rope_theta"], "partial_rotary_factor": 1.0} | dict(told.defaults)
        parameters = theirs.rope_parameters["full_attention"] if told.has_local_rope else theirs.rope_parameters
        assert parameters["rope_theta"] == rope["rope_theta"]
        assert parameters.get("partial_rotary_factor", 1.0) == rope["partial_rotary_factor"]
    needed = dict.fromkeys(NULLS.get(family, ()), 2)
    left_out = from_config_json({"model_type": family, **needed})
    saved = from_config_json(theirs.to_dict() | needed)
    assert computed(left_out) == computed(saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_told(family: FamilyName) -> None:
    """A field of ours is told by config.json, is fixed by the class, or shapes training alone."""
    told = family_of(family)
    sections = tuple(f"{name}." for name in section_types() if told.has(name))
    fixed = {key for key, values in told.expressible.items() if len(values) == 1}
    for key in field_defaults():
        if "." not in key or key.startswith(sections):
            assert key in told.told | fixed or key.startswith(TRAINING_ONLY), key
    assert told.told.isdisjoint(fixed)


def test_silence_means_no() -> None:
    """A field that a family says nothing of is refused unless it is the default; parts of a model too."""
    silent = dataclasses.replace(family_of("qwen3_moe"), allowed={}).expressible
    assert silent["qk_norm"] == (False,)
    assert silent["moe.score"] == ("softmax",)
    assert "moe.z_loss" not in silent and "moe.balance" not in silent
    assert not [key for key in family_of("llama").expressible if key.startswith("moe.")]


@pytest.mark.parametrize(("family", "name"), NAMED)
def test_published_models(family: FamilyName, name: str) -> None:
    """Each published size is that of its config.json; that DeepSeek's and gpt-oss's weights are quantized is told."""
    content = {"model_type": family, **OUTSIDE, **published_row(name)["config"]}
    if "hidden_act" not in {**family_of(family).keys, **family_of(family).constants}:
        del content["hidden_act"]
    published = family_of(family).published[name]
    if "quantization_config" in content:
        assert [line.split()[1].partition("=")[0] for line in problems(content)] == ["quantization_config"]
        del content["quantization_config"]
    read = from_config_json(content)  # with the files' module that predicts a second token
    assert len(read.mtp_layers) == content.get("num_nextn_predict_layers", 0)
    assert dataclasses.replace(read, mtp=None) == published
    assert list(check_family(published)) == []


@pytest.mark.parametrize(("family", "name"), NAMED)
def test_published_parameters(family: FamilyName, name: str) -> None:
    """The counts are those of the published files, to the last one."""
    config = family_of(family).published[name]
    ours = count_parameters(config).total
    if family == "glm4_moe":
        ours += beyond_glm(config)
    assert ours == published_row(name)["parameters"]


def test_planted_size_without_its_row_is_named() -> None:
    with pytest.raises(AssertionError, match=r"published_models\.json has no row of gated-7b: "):
        published_row("gated-7b")


def beyond_glm(config: ModelConfig) -> int:
    """Numbers in GLM's files that our model lacks: selection biases, and the module that predicts a second token."""
    assert config.moe is not None
    module = dataclasses.replace(config, n_layers=1, moe=dataclasses.replace(config.moe, n_dense_layers=0))
    joined = 2 * config.d_model**2 + 2 * config.d_model  # of the embedding and the hidden state, each normed
    router_biases = (config.n_moe_layers + 1) * config.moe.n_experts
    return count_parameters(module).total + joined + router_biases


@pytest.mark.parametrize(("family", "change", "told"), REFUSED, ids=[f"{row[0]} {row[1]}" for row in REFUSED])
def test_a_model_beyond_ours_is_refused(family: FamilyName, change: dict[str, Any], told: str) -> None:
    lines = problems(config_json_of(example_config(family)) | change)
    assert len(lines) == 1
    assert told in lines[0]
    assert lines[0].startswith("config.json: ") and "; " in lines[0] and lines[0].isprintable() and len(lines[0]) < 300


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("granitemoe", {"position_embedding_type": "rope"}),
        ("qwen3", {"_attn_implementation_autoset": True}),
        ("gpt2", {"tokenizer_class": "T5Tokenizer"}),
    ],
)
def test_what_only_version_4_writes_is_read(family: FamilyName, more: dict[str, Any]) -> None:
    content = to_config_json(example_config(family), 64, SpecialTokens(), "float32")
    assert from_config_json(content | more) == from_config_json(content)


def test_keys_of_published_files_that_the_class_does_not_look_at_are_passed_over() -> None:
    content = config_json_of(example_config("minimax_m2"))
    more = {"attn_type_list": [1, 1], "use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1}
    more |= {"mlp_intermediate_size": 8192, "shared_moe_mode": "sigmoid", "layernorm_mlp_beta": 1.0}
    assert from_config_json(content | more) == from_config_json(content)


def test_frequencies_of_gemma_3_s_larger_sizes_are_the_class_s() -> None:
    """Their text_config tells the scaling without a base, beside the windows' own base, which is not scaled."""
    content = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config, tables = from_config_json(content), AutoConfig.for_model(**content).rope_parameters
    assert tables["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": config.rope_theta}
    assert tables["sliding_attention"] == {"rope_type": "default", "rope_theta": config.local_rope_theta}
    assert config.rope_scaling == LinearScaling(factor=8.0)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"rope_scaling": {}},
        {"rope_scaling": None},
        {"rope_parameters": None},
        {"rope_parameters": {}},
        {"rope_scaling": {}, "rope_parameters": {}},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {}, "rope_theta": 7.0},
        {"rope_parameters": {}, "rope_theta": 7.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["gpt_oss", "cwm"])
def test_positions_that_are_left_out_are_the_class_s(family: FamilyName, told: dict[str, Any]) -> None:
    content = {"model_type": family, **told}
    config, table = from_config_json(content), AutoConfig.for_model(**content).rope_parameters
    scaling = config.rope_scaling
    assert table["rope_theta"] == config.rope_theta
    assert table["rope_type"] == ("default" if scaling is None else scaling.name)
    check_scaling(scaling, table)


def check_scaling(scaling: RopeScaling | None, table: dict[str, Any]) -> None:
    """Fails where a field of the scaling is not what the class's table says."""
    names = {"original_seq_len": "original_max_position_embeddings", "query_growth": "llama_4_scaling_beta"}
    for each in () if scaling is None else dataclasses.fields(scaling):
        key = names.get(each.name, each.name)
        ours, left_out = getattr(scaling, each.name), {"query_growth": 0.0, "truncate": True}.get(each.name)
        assert each.name == "name" or table.get(key, left_out) == ours, key


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"rope_scaling": {}},
        {"rope_parameters": None, "rope_theta": 7.0},
        {"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.25}},
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0, "rope_theta": 7.0, "max_position_embeddings": 9}},
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.25, "type": "yarn"}, "rope_theta": 7.0},
    ],
    ids=str,
)
def test_positions_of_ministral_3_are_the_class_s(told: dict[str, Any]) -> None:
    """Whatever the file leaves out; a base too, which is another one in a file that has the other numbers."""
    content = {"model_type": "ministral3", **told}
    config, table = from_config_json(content), AutoConfig.for_model(**content).rope_parameters
    assert table["rope_theta"] == config.rope_theta
    check_scaling(config.rope_scaling, table)


BESIDE = [
    ("llama", {"quantization_config": None}),
    ("llama", {"unsloth_fixed": True, "unsloth_version": "2025.12.5"}),
    ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
    ("mixtral", {"attention_bias": False}),
    ("qwen2", {"use_mrope": False}),
    ("qwen3_moe", {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}),
    ("qwen3_next", {"use_sliding_window": False}),
    ("qwen3_5_text", {"mlp_only_layers": [], "output_gate_type": "swish"}),
    ("qwen3_5_moe_text", {"mlp_only_layers": [], "output_gate_type": "swish"}),
    ("ernie4_5_moe", {"moe_gate": "topk", "use_rmsnorm": True}),
    ("dots1", {"use_sliding_window": False}),
    ("gpt_neox", {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
    ("gemma2", {"_attn_implementation": "eager", "sliding_window_size": 4096}),
    ("nemotron", {"rope_percent": 0.5}),
]


# The other keys of a config.json in which version 4.2x wrote all that its base class has.
FULL_DUMP = {
    **base_keys.DEFAULTS,
    **base_keys.GENERATION,
    "decoder_start_token_id": None,
    "finetuning_task": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0},
    "output_attentions": False,
    "output_hidden_states": False,
    "problem_type": None,
    "return_dict": True,
    "sep_token_id": None,
    "task_specific_params": None,
    "tf_legacy_loss": False,
    "tokenizer_class": None,
    "use_bfloat16": False,
    "xla_device": None,
}
BESIDE += [(family, FULL_DUMP) for family in ("llama", "gpt2", "gemma2", "qwen3_5_text")]


@pytest.mark.parametrize(
    ("family", "more"), BESIDE, ids=[f"{family} {min(more)} {len(more)}" for family, more in BESIDE]
)
def test_keys_that_published_files_have_besides_change_nothing(family: FamilyName, more: dict[str, Any]) -> None:
    """Qwen3-Coder's, Qwen2.5's, SmolLM2's and others': neither here nor in what the class computes."""
    content = config_json_of(example_config(family))
    assert from_config_json(content | more) == from_config_json(content)
    tokens_BS = torch.arange(12).view(1, 12)
    logits_BSV = []
    for each in (content, content | more):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**each), trust_remote_code=False).float().eval()
        with torch.no_grad():
            logits_BSV.append(model(tokens_BS).logits)
    assert torch.equal(*logits_BSV) and logits_BSV[0].std() > 0


@pytest.mark.parametrize(
    ("start", "end", "step", "fields"),
    [
        (1, -1, 1, (1, 1, ())),
        (0, 2, 1, (0, 1, (3,))),
        (1, 1, 1, (1, 1, (2, 3))),
        (1, 3, 2, (0, 2, ())),
        (0, 2, 2, (0, 2, (3,))),
        (3, 1, 1, (4, 1, ())),
        (9, 9, 1, (4, 1, ())),
        (0, -5, 1, (4, 1, ())),
        (0, 9, 5, (4, 1, ())),
    ],
)
def test_run_of_layers_with_experts_is_that_of_the_class(start: int, end: int, step: int, fields) -> None:
    """ERNIE's, of four layers."""
    told = {"moe_layer_start_index": start, "moe_layer_end_index": end, "moe_layer_interval": step}
    content = {**config_json_of(example_config("ernie4_5_moe")), "num_hidden_layers": 4, **told}
    config = from_config_json(content)
    assert config.moe is not None and not [*config.problems(), *check_family(config)]
    assert (config.moe.n_dense_layers, config.moe.every_n_layers, config.moe.dense_layers) == fields
    assert from_config_json(config_json_of(config)).moe == config.moe
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content), trust_remote_code=False)
    assert [config.is_moe_layer(layer) for layer in range(4)] == [
        hasattr(each.mlp, "gate") for each in theirs.model.layers
    ]


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "gemma3_text",
        "olmo3",
        "ernie4_5_moe",
        "afmoe",
        "ministral",
        "exaone4",
        "exaone_moe",
        "hy_v3",
        "mellum",
        "granite_swa",
        "granitemoe_swa",
        "cwm",
        "vaultgemma",
    ],
)
@pytest.mark.parametrize("key", ["num_hidden_layers", "max_window_layers"])
def test_a_number_of_layers_that_no_model_has_makes_no_list(family: FamilyName, key: str) -> None:
    """Ten thousand million: what would follow from it is left out, and model.n_layers' own range refuses it."""
    window = {"layer_types": None, "use_sliding_window": True, "sliding_window": 8}
    content = {**config_json_of(example_config(family)), **(window if family == "qwen2" else {"layer_types": None})}
    if "layer_types" not in family_of(family).keys:
        del content["layer_types"]
    if key in family_of(family).keys:
        assert len(from_config_json({**content, key: 10**10}).full_attention_layers) <= 2


def test_settings_of_generation_and_their_defaults_are_those_of_transformers() -> None:
    theirs = GenerationConfig._get_default_generation_params()
    assert {key: value for key, value in theirs.items() if key != "use_cache"} == base_keys.GENERATION


@pytest.mark.parametrize("family", FAMILIES)
def test_no_class_has_a_key_of_its_own_that_is_passed_over_as_its_base_s(family: FamilyName) -> None:
    fields = {each.name for each in dataclasses.fields(type(AutoConfig.for_model(family)))}
    told = {*family_of(family).keys, *family_of(family).constants, *family_of(family).passed_over}
    assert not (fields - told) & {*base_keys.PASSED_OVER, *base_keys.GENERATION, *base_keys.DEFAULTS}


def test_all_problems_at_once() -> None:
    content = config_json_of(example_config("mixtral")) | {
        "hidden_size": None,
        "vocab_size": 1.5,
        "x": 1,
        "hidden_act": "relu",
    }
    assert len(problems(content)) == 4


def test_planted_default_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default that is not the class's own fails the comparison."""
    monkeypatch.setitem(family_of("mixtral").defaults, "rms_norm_eps", 1e-6)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="rms_norm_eps"):
        test_defaults_are_those_of_the_class("mixtral")
