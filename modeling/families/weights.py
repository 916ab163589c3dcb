"""Weights to and from the files of Hugging Face transformers (the layout that 5.x writes)."""

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from modeling.config import BiasBalance, ModelConfig
from modeling.families.family import family_of
from modeling.logical import logical_shapes

LAYER = re.compile(r"(?<=^layers\.)\d+")


def hf_template(config: ModelConfig, name: str) -> str:
    """The name of logical tensor ``name`` in transformers' files; {expert} stands for the expert of a stack."""
    layer = LAYER.search(name)
    template = family_of(config.family).weights[LAYER.sub("{layer}", name)]
    return template if layer is None else template.replace("{layer}", layer.group())


def to_hf(config: ModelConfig, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that logical tensor ``name`` becomes: itself, or one for each expert of a stack. No copies.

    A router without the selection bias that transformers' class has brings a bias of zeros.
    """
    template = hf_template(config, name)
    if "{expert}" in template:
        for expert, matrix in enumerate(tensor):
            yield template.replace("{expert}", str(expert)), matrix
    else:
        yield template, tensor
    if lacks_bias(config, name):
        yield hf_template(config, name.replace("router.weight", "router.bias")), torch.zeros(tensor.shape[0])


def hf_parts(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of each tensor in transformers' files that logical tensor ``name`` is made of, in order."""
    template = hf_template(config, name)
    if "{expert}" in template:
        for expert in range(shape[0]):
            yield template.replace("{expert}", str(expert)), shape[1:]
    else:
        yield template, shape


def lacks_bias(config: ModelConfig, name: str) -> bool:
    """Whether ``name`` is the weight of a router that has a selection bias in transformers' class, but not here."""
    has_bias = config.moe is not None and isinstance(config.moe.balance, BiasBalance)
    return family_of(config.family).has_selection_bias and name.endswith("router.weight") and not has_bias


def from_hf(config: ModelConfig, get_tensor: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every logical tensor of the model, read by ``get_tensor(hf_name)``.

    ValueError where a shape differs, or where transformers' router has a selection bias that the config has not.
    """
    for name, shape in logical_shapes(config).items():
        template = hf_template(config, name)
        if "{expert}" in template:
            tensor = torch.stack([get_tensor(template.replace("{expert}", str(expert))) for expert in range(shape[0])])
        else:
            tensor = get_tensor(template)
        if tensor.shape != shape:
            raise ValueError(f"{template} has shape {tuple(tensor.shape)}, but {name} has {shape}")
        if lacks_bias(config, name):
            bias_name = hf_template(config, name.replace("router.weight", "router.bias"))
            if get_tensor(bias_name).any():
                raise ValueError(f"{bias_name} is not zero, which needs model.moe.balance.name=bias")
        yield name, tensor
