"""Builds models of a given shape from other trainers' packages, Megatron-core and torchtitan, for one CPU process.

Their code runs as it is installed (docs/measurements.md has the versions). Both are written for CUDA; each function's
docstring says what replaces it. Neither computes a balance loss here; Roundtable's model does.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.config import ModelConfig
from modeling.context import attention_mask

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # takes tokens, targets, positions and documents (B, S)


def build_megatron_core(config: ModelConfig, seq_len: int, dtype: torch.dtype) -> tuple[nn.Module, Loss]:
    """Megatron-core's GPTModel of its local layers, and its loss on a batch, whose documents a mask separates.

    Attention is the plain formula with a mask. Experts are computed one after another, since its grouped products need
    CUDA. Positions run through a whole row, which changes nothing between tokens of one document under RoPE.

    Replaced for the CPU: the current CUDA device is reported as the CPU; the tracker of CUDA's random states for
    dropout, which is off, is the one that keeps none; and a name that its router checks without TransformerEngine, but
    never declares, is declared as None.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    assert config.moe is not None
    moe_utils.te_general_gemm = None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)
    settings = TransformerConfig(
        num_layers=config.n_layers,
        hidden_size=config.d_model,
        ffn_hidden_size=config.d_ff,
        num_attention_heads=config.n_heads,
        num_query_groups=config.n_kv_heads,
        kv_channels=config.head_dim,
        qk_layernorm=config.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        num_moe_experts=config.moe.n_experts,
        moe_ffn_hidden_size=config.moe.d_ff,
        moe_router_topk=config.moe.top_k,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
    )
    layers = get_gpt_layer_local_spec(
        num_experts=config.moe.n_experts, qk_layernorm=config.qk_norm, normalization="RMSNorm"
    )
    model = GPTModel(
        settings,
        layers,
        config.vocab_size,
        seq_len,
        position_embedding_type="rope",
        rotary_base=int(config.rope_theta),
        share_embeddings_and_output_weights=config.tie_embeddings,
    ).to(dtype)

    def loss(tokens_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor) -> Tensor:
        mask_BSS = attention_mask(positions_BS, documents_BS, positions_BS, documents_BS, None)
        return model(tokens_BS, positions_BS, ~mask_BSS[:, None], labels=targets_BS).float().mean()

    return model, loss


def build_torchtitan(config: ModelConfig, seq_len: int, dtype: torch.dtype) -> tuple[nn.Module, Loss]:
    """torchtitan's Qwen3Model, and its loss on a batch whose rows are one document each.

    Attention is torch's with ``is_causal``, since its other kinds, which separate documents, cannot be trained on a
    CPU. Experts are computed one after another, since its grouped products are in bf16 only, over rows that a CUDA
    kernel arranges.

    Replaced for the CPU: its router counts integers by ``torch.histc``, which works on CUDA only; here they are counted
    as floats.
    """
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs

    assert config.moe is not None
    plain_histc = torch.histc

    def histc(numbers: Tensor, bins: int, min: int, max: int) -> Tensor:
        return plain_histc(numbers.float(), bins, min, max).to(numbers.dtype)

    torch.histc = histc  # type: ignore[assignment]
    experts = MoEArgs(
        num_experts=config.moe.n_experts,
        num_shared_experts=0,
        top_k=config.moe.top_k,
        score_func="softmax",
        route_norm=config.moe.normalize_top_k,
        score_before_experts=False,
        use_grouped_mm=False,
        load_balance_coeff=None,
    )
    settings = Qwen3ModelArgs(
        dim=config.d_model,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        vocab_size=config.vocab_size,
        head_dim=config.head_dim,
        hidden_dim=config.d_ff,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        qk_norm=config.qk_norm,
        max_seq_len=seq_len,
        attn_type="sdpa",
        enable_weight_tying=config.tie_embeddings,
        moe_enabled=True,
        moe_inter_dim=config.moe.d_ff,
        moe_args=experts,
    )
    model = Qwen3Model(settings)
    with torch.no_grad():
        model.init_weights()
    model.to(dtype)

    def loss(tokens_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor) -> Tensor:
        assert not documents_BS.any(), "a row has several documents"
        return F.cross_entropy(model(tokens_BS).float().flatten(0, 1), targets_BS.flatten())

    return model, loss
