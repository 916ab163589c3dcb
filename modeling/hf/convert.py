"""Weights and configurations to and from the files of Hugging Face transformers (the layout that 5.x writes)."""

import re
from collections.abc import Callable, Iterator
from typing import Any, assert_never

import torch
from torch import Tensor

from modeling.config import BiasBalance, ModelConfig, MoEConfig
from modeling.decoder import build_decoder
from modeling.hf import glm4_moe, llama, mixtral, qwen3_moe
from modeling.hf.common import SpecialTokens

LAYER = re.compile(r"(?<=^layers\.)\d+")


def tensor_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Every logical tensor of the model, parameters and router biases, in the order of the layers."""
    with torch.device("meta"):
        model = build_decoder(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return shapes | {name: buffer.shape for name, buffer in model.named_buffers()}


def hf_weights(config: ModelConfig) -> dict[str, str]:
    """The family's table: our name -> the name in transformers' files, with {layer} and {expert}."""
    match config.family:
        case "llama":
            return llama.WEIGHTS
        case "mixtral":
            return mixtral.WEIGHTS
        case "qwen3_moe":
            return qwen3_moe.WEIGHTS
        case "glm4_moe":
            return glm4_moe.WEIGHTS
        case _:
            assert_never(config.family)


def hf_template(config: ModelConfig, name: str) -> str:
    """The name of logical tensor ``name`` in transformers' files; {expert} stands for the expert of a stack."""
    layer = LAYER.search(name)
    template = hf_weights(config)[LAYER.sub("{layer}", name)]
    return template if layer is None else template.replace("{layer}", layer.group())


def to_hf(config: ModelConfig, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that logical tensor ``name`` becomes: itself, or one for each expert of a stack. No copies.

    A router without the selection bias that transformers' class has (glm4_moe) brings a bias of zeros.
    """
    template = hf_template(config, name)
    if "{expert}" in template:
        for expert, matrix in enumerate(tensor):
            yield template.replace("{expert}", str(expert)), matrix
    else:
        yield template, tensor
    if lacks_bias(config, name):
        yield hf_template(config, name.replace("router.weight", "router.bias")), torch.zeros(tensor.shape[0])


def lacks_bias(config: ModelConfig, name: str) -> bool:
    """Whether ``name`` is the weight of a router that has a selection bias in transformers' class, but not here."""
    has_bias = config.moe is not None and isinstance(config.moe.balance, BiasBalance)
    return config.family == "glm4_moe" and name.endswith("router.weight") and not has_bias


def from_hf(config: ModelConfig, get_tensor: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every logical tensor of the model, read by ``get_tensor(hf_name)``.

    ValueError where a shape differs, or where transformers' router has a selection bias that the config has not.
    """
    for name, shape in tensor_shapes(config).items():
        template = hf_template(config, name)
        if "{expert}" in template:
            tensor = torch.stack([get_tensor(template.replace("{expert}", str(expert))) for expert in range(shape[0])])
        else:
            tensor = get_tensor(template)
        if tensor.shape != shape:
            raise ValueError(f"{template} has shape {tuple(tensor.shape)}, but {name} has {tuple(shape)}")
        if lacks_bias(config, name):
            bias_name = hf_template(config, name.replace("router.weight", "router.bias"))
            if get_tensor(bias_name).any():
                raise ValueError(f"{bias_name} is not zero, which needs model.moe.balance.name=bias")
        yield name, tensor


def hf_config(config: ModelConfig, seq_len: int, special: SpecialTokens, dtype: str) -> dict[str, Any]:
    """config.json: what `AutoConfig` reads. ``dtype`` is torch's name of it, e.g. "bfloat16".

    transformers 5 looks for the rotary embedding's numbers in rope_parameters, and 4 beside the other keys: it passes
    over rope_parameters and takes its classes' defaults, in silence. Both forms are written, of dtype too.
    """
    match config.family:
        case "llama":
            architecture, family = llama.ARCHITECTURE, llama.family_config(config)
        case "mixtral":
            architecture, family = mixtral.ARCHITECTURE, mixtral.family_config(config, moe_of(config))
        case "qwen3_moe":
            architecture, family = qwen3_moe.ARCHITECTURE, qwen3_moe.family_config(config, moe_of(config))
        case "glm4_moe":
            architecture, family = glm4_moe.ARCHITECTURE, glm4_moe.family_config(config, moe_of(config))
        case _:
            assert_never(config.family)
    rope = {key: value for key, value in family["rope_parameters"].items() if key != "rope_type"}
    return {
        "architectures": [architecture],
        "model_type": config.family,
        **family,
        **rope,
        "max_position_embeddings": seq_len,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": special.bos,
        "eos_token_id": special.eos,
        "pad_token_id": special.pad,
        "use_cache": True,
    }


def generation_config(special: SpecialTokens) -> dict[str, Any]:
    """generation_config.json: sampling from the model's own distribution, up to EOS.

    There is no max_length: transformers warns when it meets max_new_tokens. Padding falls back on EOS, as it would
    anyway, with a warning. A top_k left out, or null, would be 50.
    """
    config = {
        "bos_token_id": special.bos,
        "do_sample": True,
        "eos_token_id": special.eos,
        "pad_token_id": special.eos if special.pad is None else special.pad,
        "top_k": 0,
    }
    return {key: value for key, value in config.items() if value is not None}


def moe_of(config: ModelConfig) -> MoEConfig:
    """The experts' configuration, of a family that cannot be without."""
    assert config.moe is not None, f"model.family={config.family} needs model.moe"
    return config.moe
