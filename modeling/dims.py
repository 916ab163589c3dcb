"""The names of the weights' dims: what a weight is, stated where it is made. No torch.

A module that makes a weight or a buffer states it beside it, under the same name::

    self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
    self.stated = {"weight": Weight(("vocab", "d_model"))}

How the model is cut, counted, initialized and decayed follows from these names, and from nothing else about a weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from modeling.config import ModelConfig

if TYPE_CHECKING:
    from torch import nn

Dim = Literal[
    "vocab",  # vocab_size
    "d_model",
    "positions",  # rows of the table of learned positions
    "heads",  # n_heads times the channels of a head
    "per_head",  # one entry a query head
    "buckets",  # of distances between tokens
    "kv_heads",  # n_kv_heads times the channels of a head, where keys and values have projections of their own
    "d_head",
    "linear_k_heads",  # linear_attention's n_k_heads times d_k
    "linear_v_heads",  # its n_v_heads times d_v
    "linear_d_v",  # channels of one value head of it
    "per_linear_head",  # one entry a value head of it
    "taps",  # tokens that a causal convolution sees
    "q_latent",  # channels into which queries are compressed before they become heads
    "kv_latent",  # channels into which keys and values are compressed
    "kv_latent_rope",  # kv_latent, and the channels of a key that are the same in all heads
    "d_ff",
    "shared_d_ff",  # n_shared_experts times moe.d_ff
    "experts",  # one entry an expert
    "expert_d_ff",
    "one",  # a single number
    "token_and_hidden",  # d_model of a token's embedding, then as many of a hidden state
    "scores",  # the router's outputs, one an expert: never cut, since every token is scored against every expert
]
DIMS: tuple[Dim, ...] = get_args(Dim)


@dataclass(frozen=True)
class Weight:
    """What one tensor of a module is.

    ``init`` is how it starts: "normal", drawn as the config's ``init`` says; "residual", the same of a matrix that
    writes to the residual stream; "ones"; "zeros"; the others are linear attention's (``modeling.init``). ``cancels``:
    its gradient is zero, whatever the model computes, so that what is found there is rounding. ``is_table``: its rows
    are looked up, and nothing is multiplied by it; a head that is tied to such a table is it.
    """

    dims: tuple[Dim, ...]
    init: Literal["normal", "residual", "ones", "zeros", "taps", "log_rates", "step_biases"] = "normal"
    cancels: bool = False
    is_table: bool = False

    @property
    def is_embedding(self) -> bool:
        """Whether its rows are a token's or a position's: an embedding, or the head."""
        return "vocab" in self.dims or "positions" in self.dims

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or a stack of experts' matrices: no vector, no stack of them, no table of biases.

        Nor are the taps of a convolution: each channel has its own.
        """
        return len([dim for dim in self.dims if dim != "experts"]) >= 2 and not {"buckets", "taps"} & {*self.dims}

    @property
    def is_multiplied(self) -> bool:
        """Whether its dims end in (out, in): hidden states are multiplied by it, or by each matrix of the stack."""
        return self.is_matrix and not self.is_table

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix between hidden states, or a stack of experts' such matrices.

        Norms, biases, embeddings and the head are not. Nor is a router or a gate of shared experts: their outputs are
        scores, as the head's are.
        """
        return self.is_matrix and not (self.is_embedding or {"scores", "one"} & {*self.dims})

    @property
    def takes_8_bits(self) -> bool:
        """Whether it is multiplied in 8 bits where the model's precision has them.

        Not by gates of a head each: their products are few, and so narrow that a rank's part may be no whole unit.
        """
        return self.is_hidden_matrix and not {"per_head", "per_linear_head"} & {*self.dims}


@dataclass(frozen=True)
class Unit:
    """What a dim is made of: ``count`` equal units, set in the config by ``key``. A rank gets whole ones."""

    key: str
    count: int


def units_of(config: ModelConfig) -> dict[Dim, Unit]:
    """The units of the dims that an axis may cut, for those dims that this model has."""
    units: dict[Dim, Unit] = {
        "heads": Unit("model.n_heads", config.n_heads),
        "vocab": Unit("model.vocab_size", config.vocab_size),
    }
    if config.has_kv_heads:
        units["kv_heads"] = Unit("model.n_kv_heads", config.n_kv_heads)
    if config.sinks or config.positions == "t5" or config.attention_gate == "headwise":
        units["per_head"] = units["heads"]
    linear = config.linear_attention
    if linear is not None:
        units["linear_k_heads"] = Unit("model.linear_attention.n_k_heads", linear.n_k_heads)
        units["linear_v_heads"] = units["per_linear_head"] = Unit("model.linear_attention.n_v_heads", linear.n_v_heads)
    moe = config.moe
    if config.n_moe_layers < config.n_layers:
        units["d_ff"] = Unit("model.d_ff", config.d_ff)
    if moe is not None:
        units["experts"] = Unit("model.moe.n_experts", moe.n_experts)
        if moe.shared_width > 0:
            key = "model.moe.n_shared_experts x model.moe.d_ff" if moe.shared_d_ff is None else "model.moe.shared_d_ff"
            units["shared_d_ff"] = Unit(key, moe.shared_width)
    return units


def stated_weights(model: "nn.Module") -> dict[str, Weight]:
    """What each parameter and buffer of ``model`` is, by its full name, parameters first. A tied one appears once.

    Raises TypeError where a module does not state one of its tensors, or states dims that do not fit it.
    """
    found: dict[str, Weight] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        prefix, _, own = name.rpartition(".")
        module = model.get_submodule(prefix)
        stated: Mapping[str, Weight] = getattr(module, "stated", {})
        told = f"{name}: {type(module).__name__}"
        if own not in stated:
            raise TypeError(f"{told} does not state what {own} is; add it to `stated` (modeling.dims)")
        weight = stated[own]
        unknown = [dim for dim in weight.dims if dim not in DIMS]
        if unknown:
            raise TypeError(f"{told} names dims {unknown}, which modeling.dims.Dim does not have")
        if len(weight.dims) != tensor.ndim:
            raise TypeError(f"{told} names dims {weight.dims} of a tensor of shape {tuple(tensor.shape)}")
        found[name] = weight
    return found
