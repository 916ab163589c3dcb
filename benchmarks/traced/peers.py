"""Ours and transformers' models of two published shapes, forward and backward over fake CUDA tensors at true size.

Each operation gets the least time that it can take at the GPU's stated rates: the figures are computed, not measured. A
model of n layers is reckoned from those of one and of two. transformers' attention is replaced by the variable-length
flash kernel that ours takes, and its experts are those by grouped products.
"""

import argparse
import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import AttentionInterface

from launcher.config.checked import load_checked
from launcher.config.tree import RunConfig
from launcher.estimate.pass_over import trace_rank
from launcher.estimate.values import KnownValues
from launcher.trace.hardware import read_hardware
from launcher.trace.ops import Op
from launcher.trace.parts import Axes
from launcher.trace.recorder import Recorder
from launcher.trace.regions import Regions
from launcher.trace.roofline import Rates, least_seconds
from modeling.counts import flops_per_token

GPU = torch.device("cuda", 0)
SHAPES = {  # name -> our config, layers, micro-batch, sequence, the part of eager transformers' time that is aimed at
    "8B": ("llama-3-8b", 16, 1, 8192, 0.9),
    "A3B": ("qwen3-30b-a3b", 6, 2, 4096, 0.75),
}


def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Causal attention by the kernel that ours takes: (B, H, S, C) in, (B, S, H, C) out."""
    n_rows, n_heads, length, n_channels = query.shape
    rows = [each.transpose(1, 2).reshape(n_rows * length, -1, n_channels) for each in (query, key, value)]
    ends = torch.empty(n_rows + 1, dtype=torch.int32, device=query.device)
    grouped = key.shape[1] != n_heads
    out = varlen_attn(*rows, ends, ends, length, length, window_size=(-1, 0), enable_gqa=grouped)
    return out.view(n_rows, length, n_heads, n_channels), None


def peer(config: RunConfig, n_layers: int) -> Any:
    """transformers' own model of the shape, weights in bf16."""
    model = config.model
    common = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.d_ff,
        "use_cache": False,
        "attn_implementation": "varlen_documents",
    }
    if model.moe is None:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
    experts = {
        "moe_intermediate_size": model.moe.d_ff,
        "num_experts": model.moe.n_experts,
        "num_experts_per_tok": model.moe.top_k,
        "experts_implementation": "grouped_mm",
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**common, **experts))


def traced_peer(config: RunConfig, n_layers: int) -> list[Op]:
    """The operations of its forward and backward passes."""
    with FakeTensorMode(allow_non_fake_inputs=True), KnownValues():
        with torch.device("cuda"):
            model = peer(config, n_layers).train()
        for weight in model.parameters():
            weight.data = weight.data.to(torch.bfloat16)
        tokens_BS = torch.empty(config.train.micro_batch_size, config.data.seq_len, dtype=torch.int64, device=GPU)
        positions_BS = torch.arange(config.data.seq_len, device=GPU)[None]
        recorder = Recorder(Regions(), Axes())
        with recorder:
            model(input_ids=tokens_BS, labels=tokens_BS, position_ids=positions_BS, use_cache=False).loss.backward()
    return recorder.ops


def traced_ours(config: RunConfig, n_layers: int, choice: str) -> list[Op]:
    """The same of ours."""
    model = dataclasses.replace(config.model, n_layers=n_layers)
    train = dataclasses.replace(config.train, compile=choice)
    return trace_rank(dataclasses.replace(config, model=model, train=train), 1, 0).ops


def seconds_of(trace: Callable[[int], list[Op]], n_layers: int, rates: Rates) -> float:
    """Of a model of so many layers."""
    one, two = (sum(least_seconds(op, rates)[0] for op in trace(depth)) for depth in (1, 2))
    return one + (n_layers - 1) * (two - one)


def main() -> None:
    """Prints the JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", default="H200")
    gpu = read_hardware(parser.parse_args().gpu)
    logging.disable(logging.CRITICAL)
    AttentionInterface.register("varlen_documents", flash)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    rates, folder = gpu.rates({}), Path(__file__).parents[2] / "configs" / "models"
    found: dict[str, Any] = {"benchmark": "traced_peers", "gpu": gpu.name, "measured": False}
    for name, (file, n_layers, micro_batch_size, seq_len, goal) in SHAPES.items():
        overrides = [f"data.seq_len={seq_len}", f"train.micro_batch_size={micro_batch_size}", "train.precision=bf16"]
        overrides += [f"train.global_batch_size={micro_batch_size}", f"model.n_layers={n_layers}"]
        config = load_checked(folder / f"{file}.yaml", overrides, world_size=1, data=False)
        peers = seconds_of(lambda depth, config=config: traced_peer(config, depth), n_layers, rates)
        flops = flops_per_token(config.model, seq_len) * micro_batch_size * seq_len
        row: dict[str, Any] = {"transformers_ms": round(1e3 * peers, 1), "goal": goal}
        for choice in ("off", "auto"):
            ours = seconds_of(
                lambda depth, config=config, choice=choice: traced_ours(config, depth, choice), n_layers, rates
            )
            mfu = flops / ours / rates.peak["bf16"]
            row[choice] = {"ms": round(1e3 * ours, 1), "of_transformers": round(ours / peers, 3), "mfu": round(mfu, 3)}
        found[name] = row
    print(json.dumps(found))
