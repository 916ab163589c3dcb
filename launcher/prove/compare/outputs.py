"""Outputs of single modules in the forward pass: the embedding, the attentions and the feed-forward layers.

Where a loss differs, they show where in the model it begins to. Shape letters: B batch, P held positions, D d_model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from modeling.decoder import ENTRY, Decoder, DecoderLayer


def watched_modules(model: Decoder) -> dict[str, nn.Module]:
    """The modules of this process whose outputs are compared, by name, in the order of execution.

    Each runs once for a micro-batch. The embedding is therefore left out where multi-token prediction uses it again.
    """
    entry = {name: getattr(model, name) for name in ENTRY if name != "embed" or not model.mtp}
    watched: dict[str, nn.Module] = {name: module for name, module in entry.items() if module is not None}
    for number, layer in model.layers.items():
        assert isinstance(layer, DecoderLayer)
        if number in model.mtp:
            watched[f"mtp.{number}"] = model.mtp[number]
        watched[f"layers.{number}.attention"] = layer.attention
        watched[f"layers.{number}.feed_forward"] = layer.feed_forward
    return watched


def record_outputs(model: Decoder, sink: Callable[[str, Tensor], None]) -> Callable[[], None]:
    """Calls ``sink(name, output_BPD)`` after every forward pass of a watched module; returns a function that ends it.

    The outputs are fp32 copies on the CPU. Recomputation in the backward pass is left out.
    """

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(_: nn.Module, __: Any, output: Any) -> None:
            if not in_backward():
                hidden_BPD = output[0] if isinstance(output, tuple) else output
                sink(name, hidden_BPD.detach().to("cpu", torch.float32, copy=True))

        return record

    handles = [module.register_forward_hook(hook(name)) for name, module in watched_modules(model).items()]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (torch.utils.checkpoint asks the same way)."""
    return torch._C._current_graph_task_id() != -1
