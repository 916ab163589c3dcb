"""The names of precisions in the config: plain values, no torch."""

from typing import Literal

Stored = Literal["fp32", "bf16", "fp16"]  # of weights and activations
Precision = Literal["fp32", "bf16", "fp16", "fp8"]


def stored_as(precision: Precision) -> Stored:
    """The precision of weights and activations. fp8 is only for the factors of matrix products, and stores bf16."""
    return "bf16" if precision == "fp8" else precision
