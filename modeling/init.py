"""Weights at step 0: a function of (seed, name) alone, whatever the layout."""

import hashlib
from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor, nn

from modeling.config import ModelConfig
from modeling.logical import logical_tensors


def initial_tensor(config: ModelConfig, seed: int, name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The logical tensor ``name`` at step 0: fp32, on the CPU, whole, as its module states (modeling.dims.Weight).

    In a stack of experts each expert is drawn by itself.
    """
    tensor = logical_tensors(config)[name]
    std = config.init_std
    match tensor.weight.init:
        case "ones":
            return torch.ones(shape)
        case "zeros":
            return torch.zeros(shape)
        case "residual":
            std /= (2 * config.n_layers) ** 0.5
        case "normal":
            pass
        case _:
            assert_never(tensor.weight.init)
    if tensor.is_expert:
        stack, matrix = name.rsplit(".", 1)
        experts = [draw_normal(seed, f"{stack}.{expert}.{matrix}", shape[1:], std) for expert in range(shape[0])]
        return torch.stack(experts)
    return draw_normal(seed, name, shape, std)


def draw_normal(seed: int, name: str, shape: torch.Size | tuple[int, ...], std: float) -> Tensor:
    """Normal fp32 values from a generator seeded by sha256 of (seed, name)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def materialize(
    model: nn.Module, config: ModelConfig, seed: int, device: str | torch.device, dtype: torch.dtype
) -> None:
    """Gives a meta-device model its weights at step 0, tensor by tensor, in ``dtype``; buffers stay fp32."""
    fill(model, lambda name, shape: initial_tensor(config, seed, name, shape).to(device, dtype), device)
    for name, buffer in model.named_buffers():
        buffer.copy_(initial_tensor(config, seed, name, buffer.shape))


@torch.no_grad()
def fill(model: nn.Module, value: Callable[[str, torch.Size], Tensor], device: str | torch.device) -> None:
    """Replaces each meta parameter by ``value(name, shape)``, one by one, and each buffer by zeros on ``device``.

    A tied weight appears in two modules, is made once, under its first name, and stays one parameter.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                new = value(prefix + name, parameter.shape)
                made[parameter] = new if isinstance(new, nn.Parameter) else nn.Parameter(new)
            module.register_parameter(name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))
