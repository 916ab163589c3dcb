"""Weights at step 0.

Each is a function of (seed, name) alone, so that every parallel layout starts from the same ones.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor, nn

from modeling.config import ModelConfig
from modeling.init_config import DepthScaledInit, Distribution, HeInit, MupInit, NormalInit, XavierInit
from modeling.logical import LogicalTensor, logical_tensors
from modeling.mup import deviation_factor, widths_of

BLOCK_NUMEL = 1 << 22  # elements of a matrix that are drawn at once, where only a part of it is wanted
VECTOR = 16  # normal values that torch draws as one group (aten/native/cpu/DistributionTemplates.h, normal_fill)


@dataclass(frozen=True)
class Spread:
    """How the elements of a tensor are drawn: independently, with mean zero and this standard deviation."""

    deviation: float
    distribution: Distribution = "normal"


def initial_tensor(config: ModelConfig, seed: int, name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The whole logical tensor ``name`` at step 0: fp32, on the CPU, drawn as its module states (modeling.dims.Weight).

    In a stack of experts each expert is drawn by itself, under a name with its number.
    """
    return initial_box(config, seed, name, (0,) * len(shape), shape, shape)


def initial_box(
    config: ModelConfig, seed: int, name: str, start: Sequence[int], shape: Sequence[int], whole: Sequence[int]
) -> Tensor:
    """A box of ``initial_tensor``: its elements of the given ``shape`` from ``start`` on. fp32, on the CPU.

    ``whole`` is the shape of the whole tensor. In a stack of experts only the experts in the box are drawn. A generator
    cannot skip, so what precedes the box in its matrix is drawn too, in blocks of BLOCK_NUMEL elements that are
    dropped: memory is that of the box and of one block.
    """
    tensor = logical_tensors(config)[name]
    if tensor.weight.init == "ones":
        return torch.ones(*shape)
    if tensor.weight.init == "zeros":
        return torch.zeros(*shape)
    if tensor.weight.init in HEAD_NUMBERS:
        drawn = draw_box(seed, name, whole, Spread(3**-0.5, "uniform"), start, shape)
        return HEAD_NUMBERS[tensor.weight.init]((drawn + 1) / 2)
    spread = spread_of(config, tensor)
    if not tensor.is_expert:
        return draw_box(seed, name, whole, spread, start, shape)
    stack, matrix = name.rsplit(".", 1)
    values = torch.empty(*shape, dtype=torch.float32)
    for number, expert in enumerate(values):
        of_expert = f"{stack}.{start[0] + number}.{matrix}"
        expert.copy_(draw_box(seed, of_expert, whole[1:], spread, start[1:], shape[1:]))
    return values


def log_rates(share_H: Tensor) -> Tensor:
    """Logarithms of decay rates, which lie evenly between MIN_RATE and MAX_RATE for shares from 0 to 1."""
    return (MIN_RATE + (MAX_RATE - MIN_RATE) * share_H).log()


def step_biases(share_H: Tensor) -> Tensor:
    """Biases that softplus turns into steps between MIN_STEP and MAX_STEP, even in their logarithm.

    ``share_H`` says where each step lies in between, from 0 to 1.
    """
    steps_H = (math.log(MIN_STEP) + math.log(MAX_STEP / MIN_STEP) * share_H).exp()
    return steps_H + (-(-steps_H).expm1()).log()


# Initial numbers of linear attention's heads, as in the code of Gated DeltaNet's authors (from Mamba, arXiv:2312.00752,
# section 3.6): at each token a head's state is multiplied by exp(-rate x step).
HEAD_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {"log_rates": log_rates, "step_biases": step_biases}
MIN_RATE = 0.01
MAX_RATE = 16.0
MIN_STEP = 1e-3
MAX_STEP = 0.1


def spread_of(config: ModelConfig, tensor: LogicalTensor) -> Spread:
    """How the config's ``init`` draws a tensor that is neither ones nor zeros.

    With s = init_std, L = n_layers, and a matrix's fan_in and fan_out:

    - depth_scaled: s, and s / sqrt(2 L) in matrices that write to the residual stream (GPT-2, section 2.3)
    - normal: s
    - xavier: sqrt(2 / (fan_in + fan_out)) (Glorot & Bengio 2010, eq. 12; eq. 16 is its uniform form)
    - he: sqrt(2 / fan_in) (He et al. 2015, arXiv:1502.01852, eq. 10)
    - mup: depth_scaled, times ``modeling.mup.deviation_factor`` (Tensor Programs V, arXiv:2203.03466, table 3)

    Glorot and He derive theirs for matrices: tables of which rows are looked up (embeddings) and vectors have s there.
    Taps of a convolution of K tokens are uniform up to 1 / sqrt(K) whatever ``init`` is, as torch has them.
    """
    if tensor.weight.init == "taps":
        return Spread((3 * tensor.shape[-1]) ** -0.5, "uniform")
    match config.init:
        case NormalInit():
            return Spread(config.init_std)
        case XavierInit() | HeInit() if not tensor.weight.is_multiplied:
            return Spread(config.init_std)
        case XavierInit():
            return Spread((2 / sum(tensor.fans)) ** 0.5, config.init.distribution)
        case HeInit():
            fan_in, _ = tensor.fans
            return Spread((2 / fan_in) ** 0.5, config.init.distribution)
        case DepthScaledInit() | MupInit():
            depth = (2 * config.n_layers) ** 0.5 if tensor.weight.init == "residual" else 1.0
            return Spread(config.init_std / depth * deviation_factor(tensor.weight, widths_of(config)))
        case _:
            assert_never(config.init)


def draw(seed: int, name: str, shape: Sequence[int], spread: Spread) -> Tensor:
    """Values of the given spread from the generator of (seed, name), fp32."""
    if spread.distribution == "uniform":
        return draw_uniform(seed, name, shape, 3**0.5 * spread.deviation)
    return draw_normal(seed, name, shape, spread.deviation)


def draw_normal(seed: int, name: str, shape: Sequence[int], std: float) -> Tensor:
    """Normal fp32 values from the generator of (seed, name)."""
    return fill_by(torch.empty(*shape, dtype=torch.float32), Spread(std), generator_of(seed, name))


def draw_uniform(seed: int, name: str, shape: Sequence[int], bound: float) -> Tensor:
    """Uniform fp32 values from -bound to bound, from the generator of (seed, name)."""
    return torch.empty(*shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator_of(seed, name))


def draw_box(
    seed: int, name: str, whole: Sequence[int], spread: Spread, start: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """The box of the given ``shape`` from ``start`` on, of the tensor of shape ``whole`` that ``draw`` would return."""
    inside = [slice(low, low + size) for low, size in zip(start, shape, strict=True)]
    if tuple(shape) == tuple(whole) or math.prod(whole) <= BLOCK_NUMEL:
        return draw(seed, name, whole, spread)[tuple(inside)]
    values, generator, stop = torch.empty(*shape, dtype=torch.float32), generator_of(seed, name), start[0] + shape[0]
    for first, last in row_blocks(whole, stop):
        block = fill_by(torch.empty(last - first, *whole[1:], dtype=torch.float32), spread, generator)
        low, high = max(first, start[0]), min(last, stop)
        if low < high:
            values[low - start[0] : high - start[0]] = block[(slice(low - first, high - first), *inside[1:])]
    return values


def row_blocks(whole: Sequence[int], stop: int) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of a tensor's rows, one block after another, until row ``stop`` is reached.

    Blocks drawn one after another from one generator are equal to the tensor drawn at once: torch draws normal values
    in groups of VECTOR, so the elements of each block but the last are a multiple of that, and the last has at least as
    many.
    """
    row = math.prod(whole[1:])
    n_rows = VECTOR * max(1, BLOCK_NUMEL // (VECTOR * row))
    first = 0
    while first < stop:
        last = first + n_rows
        if (whole[0] - last) * row < VECTOR:
            last = whole[0]
        yield first, last
        first = last


def fill_by(values: Tensor, spread: Spread, generator: torch.Generator) -> Tensor:
    """The tensor ``values``, filled in place with the generator's next values of that spread."""
    if spread.distribution == "uniform":
        bound = 3**0.5 * spread.deviation
        return values.uniform_(-bound, bound, generator=generator)
    return values.normal_(0.0, spread.deviation, generator=generator)


def generator_of(seed: int, name: str) -> torch.Generator:
    """A generator seeded by sha256 of (seed, name)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))


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

    A tied weight, which appears in two modules, is made once, under its first name, and stays one parameter.
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
