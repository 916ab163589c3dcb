"""Named dims of weights: each module states, where it makes a weight, what that weight is. No torch.

A module that makes a weight or a buffer states it beside it, under the same name::

    self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
    self.stated = {"weight": Weight(("vocab", "d_model"))}

How a weight is sharded, counted, initialized and decayed follows from these names alone.
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
    "per_head",  # one entry for each query head
    "buckets",  # of distances between tokens
    "kv_heads",  # n_kv_heads times the channels of a head, where keys and values have projections of their own
    "d_head",
    "linear_k_heads",  # linear_attention's n_k_heads times d_k
    "linear_v_heads",  # linear_attention's n_v_heads times d_v
    "linear_d_v",  # channels of one value head of linear attention
    "per_linear_head",  # one entry for each value head of linear attention
    "taps",  # tokens that a causal convolution sees
    "q_latent",  # channels into which queries are compressed before they become heads
    "kv_latent",  # channels into which keys and values are compressed
    "kv_latent_rope",  # kv_latent, and the channels of a key that are the same in all heads
    "d_ff",
    "shared_d_ff",  # n_shared_experts times moe.d_ff
    "experts",  # one entry for each expert
    "expert_d_ff",
    "one",  # a single number
    "token_and_hidden",  # d_model of a token's embedding, then as many of a hidden state
    "scores",  # the router's outputs, one per expert: never sharded, since every token is scored against every expert
]
DIMS: tuple[Dim, ...] = get_args(Dim)


@dataclass(frozen=True)
class Weight:
    """What one tensor of a module is: its dims by name, and how it is initialized and used.

    ``init`` is how it starts: "normal", drawn as the config's ``init`` says; "residual", the same for a matrix whose
    output is added to the residual stream; "ones"; "zeros"; the others are particular to linear attention
    (``modeling.init``). ``cancels``: the gradient is zero by construction, so any value found there is rounding error.
    ``is_table``: its rows are looked up rather than multiplied by. A head that is tied to such a table is the same
    tensor.
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
        """Whether it is a matrix, or a stack of experts' matrices, rather than a vector or a stack of vectors.

        A table of biases by distance is not one, nor are the taps of a convolution, where each channel has its own.
        """
        return len([dim for dim in self.dims if dim != "experts"]) >= 2 and not {"buckets", "taps"} & {*self.dims}

    @property
    def is_multiplied(self) -> bool:
        """Whether its dims end in (out, in): hidden states are multiplied by it, or by each matrix of the stack."""
        return self.is_matrix and not self.is_table

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix from hidden states to hidden states, or a stack of experts' such matrices.

        Norms, biases, embeddings and the head are not. Neither are a router and a gate of shared experts, whose outputs
        are scores, like the head's.
        """
        return self.is_matrix and not (self.is_embedding or {"scores", "one"} & {*self.dims})

    @property
    def takes_8_bits(self) -> bool:
        """Whether it is multiplied in 8 bits when the model's precision is fp8.

        Projections to one gate for each head are not: they are cheap, and a rank's part may be too narrow for the
        kernels.
        """
        return self.is_hidden_matrix and not {"per_head", "per_linear_head"} & {*self.dims}


@dataclass(frozen=True)
class Unit:
    """The indivisible units of a dim, such as heads.

    A rank gets whole ones; the config's ``key`` sets their ``count``.
    """

    key: str
    count: int


def units_of(config: ModelConfig) -> dict[Dim, Unit]:
    """The units of each dim that parallelism may shard, for the dims that this model has."""
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
