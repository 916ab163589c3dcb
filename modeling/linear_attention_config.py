"""The configuration of linear attention: plain values, no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Interval

from modeling.ranges import Count


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464, section 3), in all layers but full_attention_layers.

    Instead of all keys and values, a head keeps a d_k x d_v matrix as its state from token to token. Each token lets
    the state decay, and writes to it the difference between its value and what the state holds for its key.
    """

    noun: ClassVar[str] = "linear attention"

    n_k_heads: Count = 16  # heads of queries and keys
    n_v_heads: Count = 32  # heads of values, each with a matrix of its own; a multiple of n_k_heads
    d_k: Count = field(default=128, metadata={"small": 8})  # channels of a head's query and key
    d_v: Count = field(default=128, metadata={"small": 16})  # channels of a head's value
    # tokens that the causal convolution of queries, keys and values sees, itself included
    conv_size: Annotated[int, Interval(ge=1, le=64)] = 4

    @property
    def k_width(self) -> int:
        """Channels of all heads' queries, and of their keys."""
        return self.n_k_heads * self.d_k

    @property
    def v_width(self) -> int:
        """Channels of all heads' values, of their gates, and of their outputs."""
        return self.n_v_heads * self.d_v

    def problems(self) -> Iterator[str]:
        """One message for each broken rule between the fields."""
        if self.n_k_heads < 1:
            return
        if self.n_v_heads % self.n_k_heads:
            near = max(1, round(self.n_v_heads / self.n_k_heads)) * self.n_k_heads
            yield (
                f"model.linear_attention.n_v_heads={self.n_v_heads} must be a multiple of "
                f"model.linear_attention.n_k_heads={self.n_k_heads} (as many values share each key); try {near}"
            )
