"""Folders as they are published, imported: with images, under other names, with keys that only some files have.

Logits are compared in fp32, to 2e-5 absolute as those of exports are; weights bit for bit.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hf_folders import LOGITS_TOLERANCE, difference, imported, loaded, said, save_hf_model, stored
from launcher.cli import main
from modeling.config import FamilyName, ModelConfig
from modeling.rope_scaling import YarnScaling
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


TEXT_MODELS: list[tuple[FamilyName, str]] = [("qwen3_5_text", "qwen3_5"), ("qwen3_5_moe_text", "qwen3_5_moe")]


def with_images(source: Path, outer: str) -> None:
    """Makes a text model's folder one of a model with images, as it is published: experts of a layer in one tensor."""
    text = loaded(source).state_dict()
    named = {name if name == "lm_head.weight" else f"model.language_{name}": tensor for name, tensor in text.items()}
    others = {"model.visual.patch_embed.proj.weight": torch.ones(4), "mtp.fc.weight": torch.ones(2)}
    save_file({**named, **others}, source / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((source / "config.json").read_text())
    for key in ("architectures", "transformers_version"):
        del content[key]
    around = {"architectures": ["X"], "model_type": outer, "image_token_id": 3, "tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps({**around, "text_config": content, "vision_config": {"depth": 1}}))


@pytest.mark.parametrize(("family", "outer"), TEXT_MODELS)
def test_the_text_model_of_one_with_images_is_read(family: FamilyName, outer: str, tmp_path: Path) -> None:
    """Qwen3.5 is published with images' weights alone, from which transformers' class reads what it needs."""
    source, out, again = tmp_path / "source", tmp_path / "run", tmp_path / "again"
    config = example_config(family, vocab_size=257)
    save_hf_model(source, config)
    before = stored(source)
    with_images(source, outer)
    assert "model.language_model.norm.weight" in stored(source)
    assert ("model.language_model.layers.0.mlp.experts.gate_up_proj" in stored(source)) == (outer == "qwen3_5_moe")
    assert said(imported(source, out).config.model) == said(config)
    assert difference(source, out) <= LOGITS_TOLERANCE
    assert main(["export", str(out), str(again)]) == 0
    after = stored(again)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


AROUND = [
    ({"text_config": None}, "text_config=null is not possible with model_type=qwen3_5: it must be a table with mod"),
    ({"text_config": {"model_type": "llama"}}, 'text_config={"model_type": "llama"} is not possible with model_ty'),
    ({"router": 1}, "router=1 is not known with model_type=qwen3_5; remove it if it changes nothing of what the m"),
    ({"quantization_config": {"bits": 8}}, 'quantization_config={"bits": 8} is not possible: quantized weights '),
    ({"quantization": {"bits": 4}}, 'quantization={"bits": 4} is not possible: quantized weights are not read; '),
]


@pytest.mark.parametrize(("change", "told"), AROUND, ids=[f"{number}" for number, _ in enumerate(AROUND)])
def test_a_model_with_images_that_cannot_be_read(change: dict[str, object], told: str, tmp_path: Path, capsys) -> None:
    save_hf_model(tmp_path / "source", example_config("qwen3_5_text", vocab_size=257))
    with_images(tmp_path / "source", "qwen3_5")
    path = tmp_path / "source/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    capsys.readouterr()
    assert main(["import", str(tmp_path / "source"), str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}: {told}") and not (tmp_path / "run").exists()


def test_a_tensor_under_both_names_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_hf_model(tmp_path / "source", example_config("qwen3_5_text", vocab_size=257))
    with_images(tmp_path / "source", "qwen3_5")
    tensors = stored(tmp_path / "source")
    tensors["model.norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    save_file(tensors, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["import", str(tmp_path / "source"), str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.language_model.norm.weight is also there as model.norm.weight; remove one of them" in line


GEMMA3_NAMES = [("language_model.model.", ""), ("model.language_model.", "model.")]


def gemma3_with_images(source: Path, config: ModelConfig, prefix: str, beside: str) -> dict[str, Tensor]:
    """Makes ``source`` a folder of Gemma 3 as its larger sizes are published, and returns the text model's tensors.

    ``prefix`` begins the names of the text model's tensors, ``beside`` those of the images' tensors.
    """
    save_hf_model(source, config)
    text = stored(source)
    content = json.loads((source / "config.json").read_text())
    kept = {key: content[key] for key in content.keys() - {"architectures", "transformers_version", "eos_token_id"}}
    around = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    around |= {"boi_token_index": 3, "eoi_token_index": 4, "image_token_index": 300, "mm_tokens_per_image": 1}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    around |= {"tie_word_embeddings": config.tie_embeddings, "initializer_range": 0.02}
    around |= {"vision_config": {**vision, "image_size": 14, "patch_size": 14}}
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**around, text_config=kept), trust_remote_code=False)
    (source / "config.json").write_text(json.dumps({**around, "text_config": kept}))
    images = {name.removeprefix("model."): each for name, each in whole.state_dict().items() if "vision" in name}
    images |= {"multi_modal_projector.mm_soft_emb_norm.weight": torch.ones(16)}
    images |= {"multi_modal_projector.mm_input_projection_weight": torch.ones(16, config.d_model)}
    named = {name.replace("model.", prefix, 1): each for name, each in text.items()}
    named |= {f"{beside}{name}": each.clone() for name, each in images.items()}
    save_file(named, source / "model.safetensors", metadata={"format": "pt"})
    return text


@pytest.mark.parametrize(("prefix", "beside"), GEMMA3_NAMES)
def test_the_text_model_of_gemma_3_with_images_is_read(prefix: str, beside: str, tmp_path: Path) -> None:
    """Sizes of 4B and more are published so, under old names or new ones, with ids beside the text_config."""
    source, out, again = tmp_path / "source", tmp_path / "run", tmp_path / "again"
    config = example_config("gemma3_text", vocab_size=257, logit_cap=None)
    before = gemma3_with_images(source, config, prefix, beside)
    assert f"{prefix}norm.weight" in stored(source) and f"{beside}vision_tower.post_layernorm.weight" in {
        name.replace("vision_model.", "") for name in stored(source)
    }
    assert said(imported(source, out).config.model) == said(config)
    assert difference(source, out) <= LOGITS_TOLERANCE
    assert main(["export", str(out), str(again)]) == 0
    assert json.loads((again / "config.json").read_text())["model_type"] == "gemma3_text"
    after = stored(again)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_head_of_gemma_3_with_images_is_read(tmp_path: Path) -> None:
    """The head of one that is not tied lies beside the text model's other tensors in old files."""
    source = tmp_path / "source"
    config = example_config("gemma3_text", vocab_size=257, logit_cap=None, tie_embeddings=False)
    head = gemma3_with_images(source, config, "language_model.model.", "")["lm_head.weight"]
    named = {name.replace("lm_head.", "language_model.lm_head."): each for name, each in stored(source).items()}
    save_file(named, source / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(imported(source, tmp_path / "run").read("head.weight"), head)


def test_ends_of_text_beside_gemma_3_s_text_config_are_kept(tmp_path: Path) -> None:
    source, out, again = tmp_path / "source", tmp_path / "run", tmp_path / "again"
    gemma3_with_images(
        source, example_config("gemma3_text", vocab_size=257, logit_cap=None), "model.language_model.", "model."
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).unlink(missing_ok=True)
    imported(source, out)
    assert main(["export", str(out), str(again)]) == 0
    assert json.loads((again / "config.json").read_text())["eos_token_id"] == [1, 106]


def test_other_tensors_and_keys_beside_gemma_3_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "source", tmp_path / "run"
    gemma3_with_images(
        source, example_config("gemma3_text", vocab_size=257, logit_cap=None), "language_model.model.", ""
    )
    path = source / "model.safetensors"
    tensors = stored(source)
    save_file(tensors | {"audio_tower.norm.weight": torch.ones(2)}, path, metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["import", str(source), str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{path}: audio_tower.norm.weight is no tensor of this model, and would not be read; remove it"
    save_file(tensors, path, metadata={"format": "pt"})
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(content | {"audio_config": {}}))
    assert main(["import", str(source), str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{source}/config.json: audio_config={{}} is not known with model_type=gemma3; remove it if")
    content["text_config"]["final_logit_softcapping"] = 30.0
    (source / "config.json").write_text(json.dumps(content))
    assert main(["import", str(source), str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = (
        "text_config.final_logit_softcapping=30.0 is not possible with model_type=gemma3, whose class knows final_log"
    )
    assert line.startswith(f"{source}/config.json: {told}")


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
