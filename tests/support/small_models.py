"""Small models of every family, and batches of packed documents for them."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from modeling.config import BiasBalance, ModelConfig, MoEConfig, NoBalance, SequenceAuxBalance
from modeling.context import Context
from modeling.decoder import Decoder, build_decoder
from modeling.init import draw_normal, materialize
from modeling.loss import IGNORE
from modeling.moe import MoE
from modeling.norm import RMSNorm

Family = Literal["llama", "mixtral", "qwen3_moe", "glm4_moe"]
FAMILIES: list[Family] = ["llama", "mixtral", "qwen3_moe", "glm4_moe"]
LENGTHS = [[7, 1, 12], [20], [3, 9, 8]]  # of the documents, row by row


@st.composite
def configs(draw: st.DrawFn, family: Family) -> ModelConfig:
    """A small model that the family can express."""
    n_kv_heads = draw(st.sampled_from([1, 2, 3]))
    n_heads = n_kv_heads * draw(st.sampled_from([1, 2, 3]))
    n_layers = draw(st.integers(1, 3))
    d_model = n_heads * draw(st.sampled_from([4, 8, 12])) if family == "llama" else 4 * draw(st.integers(2, 12))
    return ModelConfig(
        family=family,
        vocab_size=draw(st.integers(11, 90)),
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=draw(st.sampled_from([4, 8, 16])),  # with 2, QK norm's gradient nearly cancels and rounding shows
        d_ff=4 * draw(st.integers(1, 12)),
        tie_embeddings=draw(st.booleans()),
        qk_norm=family == "qwen3_moe" or (family == "glm4_moe" and draw(st.booleans())),
        sliding_window=draw(st.none() | st.integers(1, 9)) if family in ("mixtral", "qwen3_moe") else None,
        rope_theta=draw(st.sampled_from([100.0, 10000.0, 1e6])),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        init_std=0.7 * d_model**-0.5,
        moe=None if family == "llama" else draw(moe_configs(family, n_layers)),
    )


@st.composite
def moe_configs(draw: st.DrawFn, family: str, n_layers: int) -> MoEConfig:
    """The experts of such a model."""
    is_glm = family == "glm4_moe"
    n_experts = draw(st.integers(2 if is_glm else 1, 9))
    return MoEConfig(
        n_experts=n_experts,
        top_k=draw(st.integers(1, n_experts)),
        d_ff=4 * draw(st.integers(1, 9)),
        n_shared_experts=draw(st.integers(1, 2)) if is_glm else 0,
        n_dense_layers=0 if family == "mixtral" else draw(st.integers(0, n_layers)),
        score="sigmoid" if is_glm else "softmax",
        normalize_top_k=family == "mixtral" or draw(st.booleans()),
        routed_scale=draw(st.sampled_from([1.0, 2.5])) if is_glm else 1.0,
        balance=draw(st.sampled_from([BiasBalance(), NoBalance()])) if is_glm else SequenceAuxBalance(coefficient=0.0),
    )


def example_config(family: Family, **changes: Any) -> ModelConfig:
    """One fixed model of the family, with everything that planted faults damage."""
    is_glm = family == "glm4_moe"
    moe = MoEConfig(
        n_experts=6,
        top_k=2,
        d_ff=24,
        n_shared_experts=1 if is_glm else 0,
        n_dense_layers=0 if family == "mixtral" else 1,
        score="sigmoid" if is_glm else "softmax",
        normalize_top_k=True,
        balance=BiasBalance() if is_glm else NoBalance(),
    )
    config = ModelConfig(
        family=family,
        vocab_size=61,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_head=16,
        d_ff=40,
        qk_norm=family in ("qwen3_moe", "glm4_moe"),
        init_std=0.12,
        moe=None if family == "llama" else moe,
    )
    return replace(config, **changes)


def build(config: ModelConfig, seed: int) -> Decoder:
    """Our model in fp32, its norms and selection biases away from one and zero so that leaving one out shows."""
    with torch.device("meta"):
        model = build_decoder(config)
    materialize(model, config, seed, "cpu", torch.float32)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, RMSNorm):
                module.weight.data += draw_normal(seed, f"{name} shift", module.weight.shape, 0.3)
            if isinstance(module, MoE) and module.router.bias is not None:
                module.router.bias += draw_normal(seed, f"{name} shift", module.router.bias.shape, 0.2)
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Logical tensors: parameters once each, and buffers."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


@dataclass
class Rows:
    """A batch of rows packed with documents: tokens, positions, documents, all (B, S)."""

    tokens_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor

    def context(self, choices: dict[int, Tensor] | None = None) -> Context:
        """A fresh context."""
        return Context(self.positions_BS, self.documents_BS, choices={} if choices is None else choices)


def packed_rows(vocab_size: int, seed: int, lengths: list[list[int]]) -> Rows:
    """Random tokens in documents of the given lengths, row by row (each row's lengths have one sum)."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(vocab_size, (len(lengths), sum(lengths[0])), generator=generator)
    positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    documents = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return Rows(tokens_BS, torch.stack(positions), torch.stack(documents))


def next_tokens(rows: Rows) -> Tensor:
    """targets_BS: the next token of the same document, IGNORE at each document's last."""
    targets_BS = torch.full_like(rows.tokens_BS, IGNORE)
    same_BS = rows.documents_BS[:, 1:] == rows.documents_BS[:, :-1]
    targets_BS[:, :-1] = torch.where(same_BS, rows.tokens_BS[:, 1:], IGNORE)
    return targets_BS
