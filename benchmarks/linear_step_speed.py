"""Times training steps with linear attention on a CPU: Roundtable beside transformers' own class. One JSON line.

    python benchmarks/linear_step_speed.py [--steps 3] [--rounds 3] [--precision fp32|bf16|auto]

A decoder of family qwen3_next, three of four layers with the gated delta rule, 16 experts and a shared one; a step and
its figures are those of step_speed.py. Rows are one document each, since transformers' implementation of the rule on a
CPU does not support packed documents. ``transformers_compiled`` has each layer compiled by torch.compile.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

import step_speed
from modeling.dtypes import DTYPES
from modeling.linear_attention_config import LinearAttentionConfig
from sides import Figures, Side, compare
from step_speed import Loss, build_ours, build_transformers, measure_steps

assert step_speed.CONFIG.moe is not None
CONFIG = replace(
    step_speed.CONFIG,
    family="qwen3_next",
    norm_adds_one=True,
    attention_gate="elementwise",
    rope_fraction=0.25,
    full_attention_layers=(3, 7),
    linear_attention=LinearAttentionConfig(n_k_heads=3, n_v_heads=6, d_k=64, d_v=64),
    moe=replace(step_speed.CONFIG.moe, n_shared_experts=1, shared_d_ff=192, shared_gate=True),
)
SIDES = (Side(name="ours", beside=None), Side(name="transformers"), Side(name="transformers_compiled", compiled=True))


def main() -> None:
    compare("linear_step_speed", __file__, __doc__, SIDES, measure)


def measure(side: str, steps: int, precision: str) -> Figures:
    """The figures of one side, as ``step_speed.measure_steps`` returns them."""
    return measure_steps(partial(build, side, DTYPES[precision]), steps, whole_rows=True)


def build(side: str, dtype: torch.dtype) -> tuple[nn.Module, Loss]:
    """A side's model, and a function that computes its loss on a batch."""
    if side == "ours":
        return build_ours(CONFIG, dtype)
    return build_transformers(CONFIG, dtype, compiled=side == "transformers_compiled", has_mask=False)


if __name__ == "__main__":
    main()
