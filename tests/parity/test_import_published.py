"""Folders as they are published, imported: under other names, with keys that only some files have.

Logits are compared in fp32, to 2e-5 absolute as those of exports are; weights bit for bit.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from hf_folders import LOGITS_TOLERANCE, difference, imported, loaded, said, save_hf_model, stored
from launcher.cli import main
from modeling.config import FamilyName
from modeling.families.config_json import InexpressibleConfig, from_config_json
from modeling.families.family import family_of
from modeling.families.text_model import text_model
from modeling.rope_scaling import DynamicScaling, YarnScaling
from small_models import example_config


def test_another_name_of_a_class_is_read(tmp_path: Path) -> None:
    """Kimi K2's config.json: the file's own code is DeepSeek-V3's, whose class transformers has under that name."""
    source, out, again = tmp_path / "source", tmp_path / "run", tmp_path / "again"
    scaling = YarnScaling(factor=32.0, original_seq_len=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)
    config = example_config("deepseek_v3", vocab_size=257, rope_scaling=scaling)
    save_hf_model(source, config, tokenizer=False)
    path = source / "config.json"
    content = json.loads(path.read_text())
    assert content["model_type"] == "deepseek_v3"
    path.write_text(json.dumps(content | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration.C"}}))
    assert said(imported(source, out).config.model) == said(config)
    path.write_text(json.dumps(content))
    assert difference(source, out) <= LOGITS_TOLERANCE
    assert main(["export", str(out), str(again), "--verify"]) == 0
    assert json.loads((again / "config.json").read_text())["model_type"] == "deepseek_v3"


CLIPPING = {"clip_qkv": None, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 0}
OF_LLAMA: list[tuple[str, str, dict[str, str], dict[str, object]]] = [
    ("internlm3", "InternLM3ForCausalLM", {"attention_bias": "qkv_bias", "mlp_bias": "bias"}, {}),
    ("iquestcoder", "IQuestCoderForCausalLM", {}, CLIPPING),
]


@pytest.mark.parametrize(("name", "architecture", "renamed", "more"), OF_LLAMA)
@pytest.mark.parametrize("has_biases", [True, False])
def test_a_model_that_llama_s_class_computes_is_read(
    name: str, architecture: str, renamed: dict[str, str], more: dict[str, object], has_biases: bool, tmp_path: Path
) -> None:
    """InternLM3 and IQuest-Coder: transformers has config classes for them, and the files code of their own."""
    source, out, again = tmp_path / "source", tmp_path / "run", tmp_path / "again"
    biases = dict.fromkeys(("qkv_bias", "o_bias", "ff_bias"), has_biases)
    scaling = DynamicScaling(factor=6.0, original_seq_len=8) if name == "internlm3" else None
    config = example_config("llama", vocab_size=257, rope_scaling=scaling, **biases)
    save_hf_model(source, config)
    path = source / "config.json"
    content = {renamed.get(key, key): value for key, value in json.loads(path.read_text()).items()}
    content |= {"model_type": name, "architectures": [architecture], **more}
    path.write_text(json.dumps(content | {"auto_map": {"AutoConfig": "configuration.C"}}))
    assert said(imported(source, out).config.model) == said(config)
    assert type(loaded(source)).__name__ == "LlamaForCausalLM"
    assert difference(source, out) <= LOGITS_TOLERANCE
    assert main(["export", str(out), str(again), "--verify"]) == 0
    exported = json.loads((again / "config.json").read_text())
    assert (exported["model_type"], exported["architectures"]) == ("llama", ["LlamaForCausalLM"])


@pytest.mark.parametrize("name", ["internlm3", "iquestcoder"])
def test_what_is_left_out_is_what_the_config_class_takes(name: str) -> None:
    """Its defaults are not Llama's."""
    theirs, content, llama = AutoConfig.for_model(name), text_model({"model_type": name}), family_of("llama")
    told = {**llama.constants, **llama.defaults, **content}
    keys = {*llama.keys, *llama.constants, *content} - {"model_type"}
    assert {key: getattr(theirs, key) for key in keys} == {key: told[key] for key in keys}
    assert from_config_json(content) == from_config_json(text_model(theirs.to_dict()))


BEYOND = [
    ({"qkv_bias": True}, "qkv_bias=true is not possible with model_type=internlm3 and mlp_bias=false, since its cl"),
    ({"mlp_bias": True}, "attention_bias=false is not possible with model_type=internlm3 and mlp_bias=true, since "),
    ({"bias": True, "mlp_bias": False, "qkv_bias": False}, "bias=true must be mlp_bias=false, of which it is anot"),
    ({"model_type": "iquestcoder", "clip_qkv": 8.0}, "clip_qkv=8.0 is not possible with model_type=iquestcoder, "),
    ({"model_type": "iquestcoder", "use_sliding_window": True}, "use_sliding_window=true is not possible with mod"),
    ({"model_type": "iquestcoder", "sliding_window": 8}, "sliding_window=8 is not possible with model_type=iquest"),
]


@pytest.mark.parametrize(("content", "told"), BEYOND, ids=[f"{number}" for number, _ in enumerate(BEYOND)])
def test_what_llama_s_class_does_not_compute_is_refused(content: dict[str, object], told: str) -> None:
    with pytest.raises(InexpressibleConfig) as caught:
        text_model({"model_type": "internlm3", **content})
    (line,) = caught.value.problems
    assert line.startswith(f"config.json: {told}")


YARN = {"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
YARN |= {"type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("arcee", {"rope_theta": 10000.0, "rope_scaling": YARN, "max_position_embeddings": 81920}),
        ("arcee", {"rope_theta": 10000.0, "rope_scaling": None, "bos_token_id": 128000}),
        ("nemotron", {"rope_theta": 10000, "partial_rotary_factor": 0.5}),
        ("nemotron", {"rope_theta": 10000.0, "rope_percent": 0.5, "rope_scaling": None}),
    ],
    ids=str,
)
def test_a_config_of_transformers_4_is_read(family: FamilyName, keys: dict[str, object], tmp_path: Path) -> None:
    """AFM's files and Minitron's, which have the rotary positions beside the other keys, the oldest as rope_percent."""
    source, out, again = tmp_path / "source", tmp_path / "run", tmp_path / "again"
    config = example_config(family, vocab_size=257)
    assert config.activation == "relu2"
    save_hf_model(source, config, tokenizer=False)
    path = source / "config.json"
    content = json.loads(path.read_text())
    new = {"rope_parameters", "dtype", "rope_theta", "partial_rotary_factor"}
    plain = {key: value for key, value in content.items() if key not in new}
    path.write_text(json.dumps(plain | keys | {"torch_dtype": "bfloat16", "transformers_version": "4.44.0"}))
    read = imported(source, out).config.model
    assert (read.activation, read.ff_gated, read.rope_theta) == ("relu2", False, 10000.0)
    assert isinstance(read.rope_scaling, YarnScaling) == (keys.get("rope_scaling") is YARN)
    assert difference(source, out) <= LOGITS_TOLERANCE
    assert main(["export", str(out), str(again), "--verify"]) == 0


CHUNKS = {"chunk_size": 40, "local_size": 8, "original_max_position_embeddings": 40}


def test_dual_chunk_attention_is_plain_up_to_the_length_that_an_import_takes(tmp_path: Path, capsys) -> None:
    """Qwen2.5-1M's files have it: the class ignores it, and vLLM computes it, alike within one chunk."""
    source, out = tmp_path / "source", tmp_path / "run"
    save_hf_model(source, example_config("qwen2", vocab_size=257))
    path = source / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"dual_chunk_attention_config": CHUNKS}))
    capsys.readouterr()
    assert imported(source, out).config.data.seq_len == 32
    rule = "dual_chunk_attention_config is not computed, as transformers' class ignores it"
    assert capsys.readouterr().err == f"{path}: {rule}: it would change nothing up to data.seq_len=32\n"
    assert difference(source, out) <= LOGITS_TOLERANCE
    assert main(["export", str(out), str(tmp_path / "again"), "--verify"]) == 0
    again = json.loads((tmp_path / "again/config.json").read_text())
    assert again["max_position_embeddings"] == 32 and "dual_chunk_attention_config" not in again


@pytest.mark.parametrize(
    "table",
    [3, {}, CHUNKS | {"sparse_attention_enabled": True}, CHUNKS | {"local_size": 40}, CHUNKS | {"chunk_size": "x"}],
)
def test_a_dual_chunk_attention_that_nobody_knows_is_refused(table: object, tmp_path: Path, capsys) -> None:
    source = tmp_path / "source"
    save_hf_model(source, example_config("qwen2", vocab_size=257))
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dual_chunk_attention_config": table}))
    capsys.readouterr()
    assert main(["import", str(source), str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}: dual_chunk_attention_config={json.dumps(table)[:20]}")
    assert "chunk_size, local_size, original_max_position_embeddings alone" in line


# The keys that files of glm-4-9b-chat-hf and GLM-4-9B-0414 have, but for special tokens; smaller.
GLM = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.47.0.dev0",
    "use_cache": True,
    "vocab_size": 257,
}


@pytest.mark.parametrize(("family", "architecture"), [("glm", "GlmForCausalLM"), ("glm4", "Glm4ForCausalLM")])
@pytest.mark.parametrize("told", [{"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.75}, {}], ids=str)
def test_glm_is_read_as_it_is_published(
    family: FamilyName, architecture: str, told: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part of each head turns, half of it where nothing is said; an export has the same bits again."""
    source, out, again = tmp_path / "source", tmp_path / "run", tmp_path / "again"
    save_hf_model(source, example_config(family, vocab_size=257, init_std=0.1))
    before = stored(source)
    assert before["model.layers.0.mlp.gate_up_proj.weight"].shape == (80, 32)
    content = {"architectures": [architecture], "model_type": family, "eos_token_id": [0, 3], "pad_token_id": 0}
    (source / "config.json").write_text(json.dumps({**content, **GLM, **told}))
    model = imported(source, out).config.model
    assert model.rope_dim == 16 * told.get("partial_rotary_factor", 0.5) and model.qkv_bias
    assert difference(source, out) <= LOGITS_TOLERANCE
    assert main(["export", str(out), str(again)]) == 0
    after = stored(again)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    del before["model.layers.0.self_attn.q_proj.weight"]
    save_file(before, source / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["import", str(source), str(tmp_path / "other")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{source} must hold model.layers.0.self_attn.q_proj.weight [64, 32], and no file does; " in line


# Hunyuan-7B's config.json without its sizes: keys of a class for more kinds of models, of which this is one.
HUNYUAN = {
    "add_classification_head": False,
    "cla_share_factor": 2,
    "class_num": 0,
    "dense_list": [4096, 0],
    "im_end_id": 5,
    "im_newline_id": 11,
    "im_start_id": 4,
    "mask_init_id": 12,
    "mlp_bias": False,
    "norm_type": "rms",
    "org_vocab_size": 128167,
    "pad_id": 127961,
    "pool_type": "last",
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "sep_token_id": 127962,
    "text_end_id": 7,
    "text_start_id": 6,
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}


# Hunyuan-A13B's has these besides, with an entry in each list for each of its 32 layers.
HUNYUAN_MOE = {
    "moe_drop_tokens": False,
    "moe_intermediate_size": [24, 24],
    "moe_layer_num_skipped": 0,
    "moe_random_routing_dropped_token": False,
    "moe_topk": [2, 2],
    "norm_topk_prob": True,
    "num_shared_expert": [1, 1],
    "use_mixed_mlp_moe": True,
}


@pytest.mark.parametrize(("family", "more"), [("hunyuan_v1_dense", {}), ("hunyuan_v1_moe", HUNYUAN_MOE)])
def test_hunyuan_s_folder_is_read_with_the_larger_base(
    family: FamilyName, more: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The frequencies and logits of the import and of its export are those that the class has for the folder."""
    source, out, again = tmp_path / "source", tmp_path / "run", tmp_path / "again"
    save_hf_model(source, example_config(family, vocab_size=257), tokenizer=False)
    path = source / "config.json"
    content = json.loads(path.read_text())
    del content["rope_parameters"]
    content = content | HUNYUAN | more | {"attention_head_dim": content["head_dim"]}
    path.write_text(json.dumps(content))
    capsys.readouterr()
    base = 10000.0 * 1000.0 ** (16 / 14)
    assert imported(source, out).config.model.rope_theta == base
    told = "rope_scaling has alpha=1000.0, which stretches the base of the frequencies"
    assert capsys.readouterr().err == f"{path}: {told}: it is read as model.rope_theta={base} without a scaling\n"
    assert difference(source, out) <= LOGITS_TOLERANCE
    assert main(["export", str(out), str(again), "--verify"]) == 0
    written = json.loads((again / "config.json").read_text())
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": base}
    assert torch.equal(loaded(again).model.rotary_emb.inv_freq, loaded(source).model.rotary_emb.inv_freq)
    assert difference(source, out) == difference(again, out)
