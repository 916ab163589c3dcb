"""Which layers of a model have experts: plain values, no torch.

Layer l (from 0) has experts where l + 1 is a multiple of ``every_n_layers``, as GShard, Switch and Llama 4 alternate
and `transformers` counts its ``decoder_sparse_step``; the leading ``n_dense_layers`` and the listed ``dense_layers``
have none all the same.
"""

from collections.abc import Iterator
from dataclasses import replace

from modeling.moe_config import MoEConfig


def has_experts(moe: MoEConfig, layer: int) -> bool:
    """Whether layer ``layer`` (from 0) has experts."""
    return would_have_experts(moe, layer) and layer not in moe.dense_layers


def would_have_experts(moe: MoEConfig, layer: int) -> bool:
    """Whether layer ``layer`` (from 0) would have experts if ``dense_layers`` were empty."""
    return layer >= moe.n_dense_layers and (layer + 1) % max(1, moe.every_n_layers) == 0


def count_with_experts(moe: MoEConfig, n_layers: int) -> int:
    """How many of ``n_layers`` layers have experts."""
    step, n_dense = max(1, moe.every_n_layers), min(moe.n_dense_layers, n_layers)
    listed = {layer for layer in moe.dense_layers if layer < n_layers and would_have_experts(moe, layer)}
    return n_layers // step - n_dense // step - len(listed)


def told_once(moe: MoEConfig, n_layers: int) -> MoEConfig:
    """An equivalent ``moe`` in which each layer without experts follows from one field only.

    Leading layers without experts are counted by ``n_dense_layers``; ``dense_layers`` lists only later ones. This turns
    a published file's list of layers without experts into Roundtable's fields.
    """
    step = max(1, moe.every_n_layers)
    if step > n_layers:
        return replace(moe, every_n_layers=1, n_dense_layers=n_layers, dense_layers=())
    listed = {layer for layer in moe.dense_layers if layer < n_layers and would_have_experts(moe, layer)}
    n_dense = moe.n_dense_layers // step * step
    while n_dense + step - 1 in listed:
        n_dense += step
    later = tuple(sorted(layer for layer in listed if layer >= n_dense))
    return replace(moe, n_dense_layers=n_dense, dense_layers=later)


def from_first_listed(moe: MoEConfig, n_layers: int) -> tuple[int, ...]:
    """The ``dense_layers`` that would leave no layer with experts from the first listed one on."""
    behind = range(min(moe.dense_layers, default=n_layers), n_layers)
    return tuple(layer for layer in behind if would_have_experts(moe, layer))


def expert_layer_problems(moe: MoEConfig, n_layers: int) -> Iterator[str]:
    """One message for each field that names layers which do not exist, or which have no experts anyway."""
    step, n_dense = moe.every_n_layers, moe.n_dense_layers
    if min(step, n_layers) < 1:
        return
    if n_dense > n_layers:
        yield f"model.moe.n_dense_layers={n_dense} must be at most model.n_layers={n_layers}; try {n_layers}"
    elif step > n_layers:
        yield (
            f"model.moe.every_n_layers={step} must be at most model.n_layers={n_layers} (no layer would have experts); "
            f"try {n_layers}"
        )
    elif n_dense % step:
        below = n_dense // step * step
        yield (
            f"model.moe.n_dense_layers={n_dense} must be a multiple of model.moe.every_n_layers={step} (the layers "
            f"between have no experts anyway); try {below}"
        )
    else:
        fitting = [layer for layer in moe.dense_layers if would_have_experts(moe, layer)]
        if len(fitting) < len(moe.dense_layers):
            yield (
                f"model.moe.dense_layers={list(moe.dense_layers)} must name layers that have experts otherwise, which "
                f"model.moe.n_dense_layers={n_dense} and model.moe.every_n_layers={step} leave; try {fitting}"
            )
