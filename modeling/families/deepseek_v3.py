"""DeepSeek-V3 (arXiv:2412.19437): latent attention, sigmoid routing within groups of experts, shared experts."""

from modeling.config import MLAConfig, ModelConfig
from modeling.families.family import Family, Key, OtherName
from modeling.families.shared import (
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EXPERT_KEYS,
    EXPERTS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    MTP,
    MTP_COPIES,
    MTP_KEYS,
    SELECTION_BIAS,
    SHARED_EXPERT_KEYS,
    SHARED_EXPERTS,
)
from modeling.moe_config import BiasBalance, MoEConfig
from modeling.rope_scaling import YarnScaling

LATENT_ATTENTION = {
    "layers.{layer}.attention.q.weight": "model.layers.{layer}.self_attn.q_proj.weight",  # where q_lora_rank is null
    "layers.{layer}.attention.q_a.weight": "model.layers.{layer}.self_attn.q_a_proj.weight",
    "layers.{layer}.attention.q_a_norm.weight": "model.layers.{layer}.self_attn.q_a_layernorm.weight",
    "layers.{layer}.attention.q_b.weight": "model.layers.{layer}.self_attn.q_b_proj.weight",
    "layers.{layer}.attention.kv_a.weight": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",
    "layers.{layer}.attention.kv_a_norm.weight": "model.layers.{layer}.self_attn.kv_a_layernorm.weight",
    "layers.{layer}.attention.kv_b.weight": "model.layers.{layer}.self_attn.kv_b_proj.weight",
    "layers.{layer}.attention.o.weight": "model.layers.{layer}.self_attn.o_proj.weight",
}

FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    # Kimi K2 (arXiv:2507.20534); its files name DeepSeek-V3's class, and bring its code
    model_types={"kimi_k2": OtherName()},
    weights={
        **DECODER,
        **LATENT_ATTENTION,
        **FEED_FORWARD,
        **EXPERTS,
        **SELECTION_BIAS,
        **SHARED_EXPERTS,
        **MTP,
    },
    copies=MTP_COPIES,
    same={"head_dim": "qk_rope_head_dim"},
    keys={
        **DECODER_KEYS,
        **FEED_FORWARD_KEYS,
        **EXPERT_KEYS,
        **SHARED_EXPERT_KEYS,
        **MTP_KEYS,
        # What the class derives from the others, and saves too.
        "head_dim": Key(ours=(), write=lambda config: config.rope_dim, read=lambda _: {}),
        "qk_head_dim": Key(ours=(), write=lambda config: config.qk_head_dim, read=lambda _: {}),
        "kv_lora_rank": "mla.kv_lora_rank",
        "n_group": "moe.n_groups",
        "q_lora_rank": "mla.q_lora_rank",
        "qk_nope_head_dim": "mla.d_nope",
        "qk_rope_head_dim": "mla.d_rope",
        "topk_group": "moe.top_k_groups",
        "v_head_dim": "mla.d_v",
    },
    constants={
        **DECODER_CONSTANTS,
        "attention_bias": False,
        "rope_interleave": True,
        # The class ignores these keys; other programs that read the files use them.
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    # Losses are no part of the model.
    ignored={
        "aux_loss_alpha": 0.0,
        "ep_size": 1,
        "output_router_logits": False,
        "seq_aux": True,
    },
    defaults={
        **DECODER_DEFAULTS,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,  # of version 5; 4 does not know the key
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    # models/deepseek_v3: the router is sigmoid with a selection bias and takes a top 2 within each group of experts;
    # shared_experts are always built; only causal masks; first_k_dense_replace counts the dense layers.
    allowed={"sliding_window": (None,), "moe.score": ("sigmoid",)},
    at_least={"moe.n_experts": 2, "moe.n_shared_experts": 1},
    may_lack=("mtp",),
    # The published files hold 8-bit weights.
    published={
        "DeepSeek-V3": ModelConfig(
            family="deepseek_v3",
            vocab_size=129280,
            d_model=7168,
            n_layers=61,
            n_heads=128,
            n_kv_heads=128,
            d_ff=18432,
            rope_scaling=YarnScaling(factor=40.0, original_seq_len=4096, mscale=1.0, mscale_all_dim=1.0),
            mla=MLAConfig(kv_lora_rank=512, q_lora_rank=1536, d_nope=128, d_rope=64, d_v=128),
            moe=MoEConfig(
                n_experts=256,
                top_k=8,
                d_ff=2048,
                n_shared_experts=1,
                n_dense_layers=3,
                n_groups=8,
                top_k_groups=4,
                score="sigmoid",
                routed_scale=2.5,
                balance=BiasBalance(),
            ),
        ),
    },
)
