"""Compares the loss and the gradient norm of Roundtable and of a peer of benchmarks/step_speed.py on equal weights.

`python peer_losses.py megatron_core|torchtitan [--planted]` prints one JSON line; `missing` names a package that is not
installed. With --planted, the peer's rotary embedding rotates by other angles.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from modeling.config import ModelConfig
from modeling.context import Context
from modeling.decoder import build_decoder
from modeling.families.weights import to_hf
from modeling.init import materialize
from modeling.moe_config import MoEConfig, NoBalance

ROOT = Path(__file__).parents[2]
BATCH, SEQ_LEN = 2, 24
CONFIG = ModelConfig(
    family="qwen3_moe",
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_head=8,
    qk_norm=True,
    d_ff=64,
    moe=MoEConfig(n_experts=6, top_k=2, d_ff=16, score="softmax", balance=NoBalance()),
)


def main(peer: str, planted: bool) -> None:
    sys.path += [str(ROOT / "benchmarks"), str(ROOT / "build" / "peers")]
    torch.manual_seed(0)
    tokens_BS, targets_BS = (torch.randint(CONFIG.vocab_size, (BATCH, SEQ_LEN)) for _ in range(2))
    lengths = [SEQ_LEN] if peer == "torchtitan" else [5, SEQ_LEN - 5]
    positions_BS = torch.cat([torch.arange(length) for length in lengths]).expand(BATCH, -1)
    documents_BS = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(BATCH, -1)
    batch = (tokens_BS, targets_BS, positions_BS, documents_BS)
    model = ours()
    out = model(tokens_BS, Context(positions_BS, documents_BS), targets_BS)
    (out.loss / targets_BS.numel()).backward()
    config = replace(CONFIG, rope_theta=100.0) if planted else CONFIG
    try:
        theirs, loss = build(peer, config)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": error.name}))
        return
    weights = dict(to_hf(CONFIG, model.named_parameters()))
    theirs.load_state_dict(titan_weights(weights) if peer == "torchtitan" else megatron_weights(weights))
    found = loss(*batch)
    found.backward()
    losses = {"ours": float(out.loss.detach()) / targets_BS.numel(), "theirs": float(found.detach())}
    print(json.dumps({"loss": losses, "norm": {"ours": norm(model), "theirs": norm(theirs)}}))


def ours() -> nn.Module:
    """Roundtable's model, with weights large enough that each of them shows in the loss."""
    with torch.device("meta"):
        model = build_decoder(CONFIG)
    materialize(model, CONFIG, 0, "cpu", torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    return model


def build(peer, config):
    from peer_models import build_megatron_core, build_torchtitan

    builder = build_torchtitan if peer == "torchtitan" else build_megatron_core
    return builder(config, SEQ_LEN, torch.float32)


def norm(model: nn.Module) -> float:
    return float(nn.utils.get_total_norm([weight.grad for weight in model.parameters() if weight.grad is not None]))


def titan_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under torchtitan's names, by its own converter."""
    from torchtitan.models.qwen3 import Qwen3ModelArgs
    from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

    settings = Qwen3ModelArgs(n_layers=CONFIG.n_layers)
    settings.moe_args.num_experts = CONFIG.moe.n_experts
    return Qwen3StateDictAdapter(settings, None).from_hf(weights)


def megatron_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under Megatron-Core's names.

    Megatron-Core fuses queries, keys and values of each group of heads, and gate and up projections.
    """
    found = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    for layer in range(CONFIG.n_layers):
        of, to = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        groups = [weights[f"{of}self_attn.{each}_proj.weight"].unflatten(0, (CONFIG.n_kv_heads, -1)) for each in "qkv"]
        found |= {
            f"{to}input_layernorm.weight": weights[f"{of}input_layernorm.weight"],
            f"{to}self_attention.linear_qkv.weight": torch.cat(groups, dim=1).flatten(0, 1),
            f"{to}self_attention.q_layernorm.weight": weights[f"{of}self_attn.q_norm.weight"],
            f"{to}self_attention.k_layernorm.weight": weights[f"{of}self_attn.k_norm.weight"],
            f"{to}self_attention.linear_proj.weight": weights[f"{of}self_attn.o_proj.weight"],
            f"{to}pre_mlp_layernorm.weight": weights[f"{of}post_attention_layernorm.weight"],
            f"{to}mlp.router.weight": weights[f"{of}mlp.gate.weight"],
        }
        for expert in range(CONFIG.moe.n_experts):
            gate, up, down = (
                weights[f"{of}mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            found[f"{to}mlp.experts.local_experts.{expert}.linear_fc1.weight"] = torch.cat([gate, up])
            found[f"{to}mlp.experts.local_experts.{expert}.linear_fc2.weight"] = down
    return found


if __name__ == "__main__":
    main(sys.argv[1], "--planted" in sys.argv)
