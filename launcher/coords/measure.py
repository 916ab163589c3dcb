"""The sizes of activations in models of several widths during their first updates.

This is the coordinate check of Yang et al. 2022 (Tensor Programs V, arXiv:2203.03466, appendix D.1).
Shape letters: B batch, S sequence, W widths, T updates made (from 0).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from launcher.config.tree import RunConfig
from launcher.prove.compare.outputs import record_outputs
from launcher.prove.reference import PlainBatch, ReferenceTrainer
from launcher.prove.shrink import shrink
from modeling.config import DROPOUTS, ModelConfig
from modeling.context import Context
from modeling.decoder import Decoder
from modeling.init_config import DepthScaledInit, InitConfig, MupInit
from modeling.moe import MoE
from modeling.optimizers.config import OptimizerConfig
from parallel.config import ParallelConfig

Parametrization = Literal["mup", "standard"]
PARAMETRIZATIONS: tuple[Parametrization, ...] = ("mup", "standard")
SEQUENCES = 4
TOKENS_SEED = 1


@dataclass(frozen=True)
class Coordinates:
    """Mean |x| of each activation, at each width, after each number of updates: arrays (T, W) by activation.

    ``sizes`` are of the activations, ``changes`` of their differences from those before the first update.
    """

    widths: tuple[int, ...]
    sizes: dict[str, np.ndarray]
    changes: dict[str, np.ndarray]

    def slopes(self, values: dict[str, np.ndarray], updates: int) -> dict[str, float]:
        """For each activation, the power of the width with which ``values`` grow, after so many updates.

        It is the slope of the least-squares line through the logarithms.
        """
        x_W = np.log(self.widths)
        return {name: float(np.polyfit(x_W, np.log(values_TW[updates]), 1)[0]) for name, values_TW in values.items()}


def small_relative(config: RunConfig) -> ModelConfig:
    """The model as `roundtable prove` shrinks it for one process: the narrowest one of its architecture, few layers.

    Dropout is off: activations are measured outside of training, and updates need no noise.
    """
    small = replace(shrink(replace(config, parallel=ParallelConfig()), 1).model, **dict.fromkeys(DROPOUTS, 0.0))
    if small.moe is None or config.model.moe is None:
        return small
    own = config.model.moe  # shrinking for a proof strengthens the auxiliary losses
    return replace(small, moe=replace(small.moe, balance=own.balance, z_loss=own.z_loss))


def widened(small: ModelConfig, d_model: int, base: int, parametrization: Parametrization) -> ModelConfig:
    """``small`` widened to ``d_model``: more heads of the same width, and wider feed-forward layers and experts.

    ``base`` is the narrowest width, where both parametrizations are the same model.
    """
    times = d_model // small.d_model
    moe = small.moe
    if moe is not None:
        shared = None if moe.shared_d_ff is None else moe.shared_d_ff * times
        moe = replace(moe, d_ff=moe.d_ff * times, shared_d_ff=shared)
    linear = small.linear_attention
    if linear is not None:
        linear = replace(linear, n_k_heads=linear.n_k_heads * times, n_v_heads=linear.n_v_heads * times)
    init: InitConfig = MupInit(base_d_model=base) if parametrization == "mup" else DepthScaledInit()
    ties = small.tie_embeddings and parametrization == "mup"
    return replace(
        small,
        d_model=d_model,
        n_heads=small.n_heads * times,
        n_kv_heads=small.n_kv_heads * times,
        d_head=None if small.d_head is None else small.head_dim,
        d_ff=small.d_ff * times,
        init=init,
        init_std=small.init_std * (small.d_model / base) ** 0.5,  # outputs of layers keep their size
        logit_divisor=d_model / base if ties else small.logit_divisor,
        linear_attention=linear,
        moe=moe,
    )


def measure(
    models: Sequence[ModelConfig],
    optimizer: OptimizerConfig,
    *,
    steps: int,
    seq_len: int,
    seed: int,
    tell: Callable[[int], None] = lambda width: None,
) -> Coordinates:
    """The activations' sizes over ``steps`` updates at the optimizer's learning rate, on the same tokens in each model.

    ``models`` differ only in their widths. Gradients are not clipped, since their norm grows with the number of
    weights. ``tell`` is called with each width before that model is trained.
    """
    rule = replace(optimizer, clip_norm=None)
    columns = []
    for model in models:
        tell(model.d_model)
        columns.append(trained_sizes(model, rule, steps=steps, seq_len=seq_len, seed=seed))
    names = columns[0][0]
    sizes, changes = (
        {name: np.stack([column[kind][name] for column in columns], axis=1) for name in names} for kind in (0, 1)
    )
    return Coordinates(tuple(model.d_model for model in models), sizes, changes)


def trained_sizes(
    config: ModelConfig, optimizer: OptimizerConfig, *, steps: int, seq_len: int, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """One model's sizes and changes by activation, each (T,): means over its layers."""
    trainer = ReferenceTrainer(config, optimizer, seed=seed)
    batch = random_batch(config.vocab_size, seq_len)
    sizes: dict[str, list[float]] = {}
    changes: dict[str, list[float]] = {}
    first: dict[str, Tensor] = {}
    for step in range(steps + 1):
        seen = activations(trainer.model, batch)
        first = first or seen
        for kind in dict.fromkeys(map(kind_of, seen)):
            alike = [name for name in seen if kind_of(name) == kind]
            sizes.setdefault(kind, []).append(mean_size([seen[name] for name in alike]))
            changes.setdefault(kind, []).append(mean_size([seen[name] - first[name] for name in alike]))
        if step < steps:
            trainer.step([batch], optimizer.lr)
    rows, moved = ({name: np.array(row) for name, row in each.items()} for each in (sizes, changes))
    return rows, moved


def kind_of(name: str) -> str:
    """The kind of an activation, by which it is averaged over layers: "attention" for "layers.3.attention"."""
    return name.rpartition(".")[2]


def mean_size(tensors: Sequence[Tensor]) -> float:
    """The mean of |x| over each tensor, averaged over the tensors."""
    return float(torch.stack([tensor.abs().mean() for tensor in tensors]).mean())


@torch.no_grad()
def activations(model: Decoder, batch: PlainBatch) -> dict[str, Tensor]:
    """The outputs of the recorded modules, the routers' logits and the head's logits for one batch, by name."""
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        stack.callback(record_outputs(model, found.__setitem__))
        for number, layer in model.layers.items():
            if isinstance(layer.feed_forward, MoE):
                handle = layer.feed_forward.router.register_forward_hook(keep_logits(found, f"layers.{number}.router"))
                stack.callback(handle.remove)
        context = Context(batch.positions_BS, batch.documents_BS)
        logits_BSV = model(batch.tokens_BS, context).logits_BSV
    assert logits_BSV is not None
    return {**found, "logits": logits_BSV}


def keep_logits(found: dict[str, Tensor], name: str) -> Callable[[Any, Any, Any], None]:
    """A forward hook for a router that stores its logits in ``found`` under ``name``."""

    def keep(_: Any, __: Any, routing: Any) -> None:
        found[name] = routing.logits_TE

    return keep


def random_batch(vocab_size: int, seq_len: int) -> PlainBatch:
    """SEQUENCES sequences of random tokens, the same ones at every width and in every update.

    As in language a token's frequency is inversely proportional to its rank (Zipf). Updates from tokens that occur
    often show their power of the width already at small widths, where those of rare tokens are noise of a lower power.
    """
    generator = torch.Generator().manual_seed(TOKENS_SEED)
    weights_V = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    tokens = torch.multinomial(weights_V, SEQUENCES * (seq_len + 1), replacement=True, generator=generator)
    tokens = tokens.view(SEQUENCES, seq_len + 1)
    tokens_BS, targets_BS = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions_BS = torch.arange(seq_len).expand_as(tokens_BS).contiguous()
    return PlainBatch(tokens_BS, targets_BS, positions_BS, torch.zeros_like(tokens_BS))
