"""Folders of models with images, as they are published: their text models are imported.

Logits are compared in fp32, to 2e-5 absolute as those of exports are; weights bit for bit.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_folders import LOGITS_TOLERANCE, difference, imported, loaded, said, save_hf_model, stored
from launcher.cli import main
from launcher.commands.trained import load_decoder
from modeling.config import FamilyName, ModelConfig
from modeling.context import Context
from modeling.rope_scaling import YarnScaling
from small_models import example_config

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


# Of Ministral 3's published config.json, but for its sizes; the original length is shortened to 8 tokens.
MINISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.2,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
        "model_type": "ministral3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 257,
    },
    "tie_word_embeddings": False,
    "transformers_version": "5.0.0.dev0",
    "vision_config": {
        "attention_dropout": 0.0,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 16,
        "image_size": 28,
        "initializer_range": 0.02,
        "intermediate_size": 16,
        "model_type": "pixtral",
        "num_attention_heads": 2,
        "num_channels": 3,
        "num_hidden_layers": 1,
        "patch_size": 14,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "vision_feature_layer": -1,
}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_ministral_3_with_images_is_read(prefix: str, is_tied: bool, tmp_path: Path) -> None:
    """Logits are those of the class with images, over three original lengths; an export is the text model alone."""
    source, out, again = tmp_path / "source", tmp_path / "run", tmp_path / "again"
    content = json.loads(json.dumps(MINISTRAL3))
    content["tie_word_embeddings"] = content["text_config"]["tie_word_embeddings"] = is_tied
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**content), trust_remote_code=False)
    whole.float().save_pretrained(source)
    names = {name: name.replace("language_model.model.", prefix, 1) for name in stored(source)}
    assert sum("vision_tower" in name or "multi_modal_projector" in name for name in names) > 4
    assert sum(name.startswith("language_model.model.layers.1.") for name in names) == 9
    save_file({names[name]: each for name, each in stored(source).items()}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(content))
    trained = imported(source, out)
    assert trained.config.model.rope_scaling == YarnScaling(
        factor=16.0, original_seq_len=8, mscale=1.0, mscale_all_dim=1.0, query_growth=0.1
    )
    assert trained.config.data.seq_len == 128 and trained.config.model.rope_theta == 1e6
    tokens_BS = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(1))
    positions_BS = torch.arange(24).expand(2, 24)
    with torch.no_grad():
        theirs_BSV = whole.eval()(input_ids=tokens_BS).logits
        ours = load_decoder(trained, "cpu", torch.float32)
        ours_BSV = ours(tokens_BS, Context(positions_BS, torch.zeros_like(positions_BS))).logits_BSV
    assert theirs_BSV.std() > 0.1
    torch.testing.assert_close(ours_BSV, theirs_BSV, rtol=0.0, atol=LOGITS_TOLERANCE)
    assert main(["export", str(out), str(again), "--verify"]) == 0
    assert json.loads((again / "config.json").read_text())["model_type"] == "ministral3"


def test_ministral_3_in_8_bits_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the folders of its instructed models are published, beside others in 16 bits."""
    source = tmp_path / "source"
    source.mkdir()
    quantized = {"activation_scheme": "static", "quant_method": "fp8"}
    (source / "config.json").write_text(json.dumps(MINISTRAL3 | {"quantization_config": quantized}))
    save_file({"language_model.model.norm.weight": torch.ones(32)}, source / "model.safetensors")
    assert main(["import", str(source), str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "quantization_config=" in line and "quantized weights are not read" in line
