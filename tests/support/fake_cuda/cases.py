"""The cases of the dry run: models and layouts, one rank of each."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from launcher.prove.shrink import WIDTH_UNIT
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.kernels.cuts import UNIT
from modeling.kernels.fp8 import Fp8Products
from modeling.kernels.fuse import Fuse, compiled, plainly
from modeling.kernels.products import AS_THEY_ARE, Products
from modeling.moe_config import SequenceAuxBalance
from modeling.mtp_config import MTPConfig
from modeling.rope_scaling import DynamicScaling, LongRopeScaling
from parallel.config import ParallelConfig
from parallel.recompute import Recompute
from small_models import example_config

PLAIN = ParallelConfig()
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "feed_forward", "full")


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one rank of a layout."""

    name: str
    config: ModelConfig
    dtype: str = "bf16"
    padding: bool = False
    recompute: Recompute = "none"
    parallel: ParallelConfig = PLAIN
    world_size: int = 1
    rank: int = 0
    most_waits: int = 0
    fuse: Fuse = plainly
    products: Products = AS_THEY_ARE
    offloads: bool = False  # activations are offloaded to the host, on streams of their own
    row_block: int | None = None  # queries in one piece, where attention scores are computed in pieces of rows


def fitting(config: ModelConfig) -> ModelConfig:
    """The config with widths that grouped products accept in 16 bits, and sizes that eight ranks can share."""
    changes: dict[str, Any] = {"vocab_size": 64, "d_ff": 48, "n_layers": 2}
    if config.moe is not None:
        widths = {"d_ff": 3 * WIDTH_UNIT, "n_experts": 8, "n_groups": min(config.moe.n_groups, 2), "top_k": 2}
        widths |= {"top_k_groups": 1} if config.moe.n_groups > 1 else {}
        changes["moe"] = dataclasses.replace(config.moe, **widths)
    return dataclasses.replace(config, **changes)


# Settings (dtype, padding, recompute) of families in the fast part, fixed so that new families do not change them.
CHOSEN: dict[FamilyName, tuple[str, bool, Recompute]] = {
    "gpt2": ("bf16", True, "selective"),
    "bloom": ("bf16", True, "full"),
    "gemma2": ("fp16", True, "feed_forward"),
    "qwen2_moe": ("bf16", False, "selective"),
    "deepseek_v3": ("bf16", True, "full"),
}


def cases() -> Iterator[Case]:
    """All cases: each family, with each setting in some of them, and the layouts of a dense and of a MoE model."""
    settings = itertools.cycle(itertools.product(("bf16", "fp16"), (True, False), RECOMPUTE))
    for family in FAMILIES:
        config = fitting(example_config(family))
        yield Case(f"{family} bf16", config)
        dtype, padding, recompute = CHOSEN[family] if family in CHOSEN else next(settings)
        dtype = "bf16" if config.moe is not None else dtype  # the rules for fake grouped products take no other
        name = f"{family} {dtype} padding={padding} recompute={recompute}"
        yield Case(f"{name} compiled", config, dtype, padding, recompute, fuse=compiled)
        yield Case(name, config, dtype, padding, recompute)
    tied = fitting(example_config("llama", tie_embeddings=True))
    yield Case("tied", tied)
    yield Case("fp32", tied, dtype="fp32")
    lengths = LongRopeScaling(original_seq_len=64, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)
    for scaling in (lengths, DynamicScaling(original_seq_len=64)):  # both depend on the length of a pass
        name = "llama " + scaling.name
        yield Case(name, dataclasses.replace(tied, family="none", d_head=8, rope_scaling=scaling))
    yield from with_auxiliary_losses()
    yield from in_pieces()
    yield from in_8_bits()
    yield from layouts()
    linear = dataclasses.replace(fitting(example_config("qwen3_next")), family="none")
    ring = ParallelConfig(cp=2, cp_attention="ring")
    yield Case("linear attention tp2 cp2", linear, parallel=ParallelConfig(tp=2, cp=2), world_size=4, rank=3)
    yield Case("linear attention ring", linear, recompute="selective", parallel=ring, world_size=2, rank=1)
    yield from on_the_host()


def with_auxiliary_losses() -> Iterator[Case]:
    """Cases with auxiliary losses (balance, z-loss of routers, multi-token prediction) and dropout."""
    config = fitting(example_config("deepseek_v3"))
    assert config.moe is not None
    moe = dataclasses.replace(config.moe, balance=SequenceAuxBalance(), z_loss=1e-3)
    dropout = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "residual_dropout": 0.1}
    config = dataclasses.replace(config, family="none", moe=moe, mtp=MTPConfig(depth=2), **dropout)
    for recompute, fuse in (("none", compiled), ("full", plainly), ("selective", compiled)):
        suffix = " compiled" * (fuse is compiled) + f" recompute={recompute}" * (recompute != "none")
        yield Case(f"deepseek_v3 auxiliary losses{suffix}", config, padding=True, recompute=recompute, fuse=fuse)
    layout: dict[str, Any] = {"parallel": ParallelConfig(tp=2, cp=2, ep=4), "world_size": 4, "rank": 3}
    waits = sum(map(config.is_moe_layer, config.all_layers))
    yield Case("deepseek_v3 auxiliary losses tp2 cp2 ep4", config, **layout, most_waits=waits)


def in_pieces() -> Iterator[Case]:
    """Cases with scores that no kernel supports, computed in pieces of rows: caps, slopes, buckets, dropout, sinks."""
    shared: dict[str, Any] = {"padding": True, "row_block": 5}
    yield Case("gemma2 in pieces", fitting(example_config("gemma2")), **shared, recompute="selective")
    none = fitting(example_config("llama"))
    yield Case("sinks fp32 in pieces", dataclasses.replace(none, family="none", sinks=True), **shared, dtype="fp32")
    for positions in ("t5", "alibi"):
        drops = positions == "alibi"
        config = dataclasses.replace(none, family="none", positions=positions, attention_dropout=0.1 * drops)
        yield Case(f"{positions} in pieces", config, **shared)


def in_8_bits() -> Iterator[Case]:
    """Cases with fp8 products, dense and of experts, compiled or not, alone and over ep."""
    dense, experts = fitting(example_config("qwen3")), fitting(example_config("qwen3_moe"))
    assert experts.moe is not None
    experts = dataclasses.replace(experts, moe=dataclasses.replace(experts.moe, d_ff=2 * UNIT))
    ep4 = {"parallel": ParallelConfig(ep=4), "world_size": 4, "rank": 3, "most_waits": experts.n_layers}
    for fuse in (plainly, compiled):
        shared: dict[str, Any] = {"fuse": fuse, "products": Fp8Products(fuse, keeps_weights=fuse is compiled)}
        yield Case(f"qwen3 fp8 {fuse.__name__}", dense, **shared)
        yield Case(f"qwen3_moe fp8 {fuse.__name__}", experts, **shared)
        yield Case(f"qwen3_moe fp8 {fuse.__name__} ep4", experts, **shared, **ep4)


def on_the_host() -> Iterator[Case]:
    """Cases with activations offloaded to the host, for each mode of recomputation, alone and under ep and tp."""
    dense, experts = fitting(example_config("qwen3")), fitting(example_config("qwen3_moe"))
    for recompute, fuse in zip(RECOMPUTE, itertools.cycle((plainly, compiled)), strict=False):
        shared: dict[str, Any] = {"recompute": recompute, "fuse": fuse, "offloads": True}
        yield Case(f"qwen3 offloads recompute={recompute}", dense, **shared)
        waits = {"none": 1, "selective": 1, "feed_forward": 2, "full": 2}[recompute] * experts.n_layers
        layout: dict[str, Any] = {"parallel": ParallelConfig(tp=2, ep=4), "world_size": 4, "rank": 3}
        yield Case(f"qwen3_moe offloads tp2 ep4 recompute={recompute}", experts, **shared, **layout, most_waits=waits)
        layout = {"parallel": ParallelConfig(tp=2, tp_overlap=True), "world_size": 2, "rank": 1}
        yield Case(f"qwen3 offloads tp2 overlap recompute={recompute}", dense, **shared, **layout)
    yield Case("qwen3 fp8 offloads", dense, products=Fp8Products(plainly), offloads=True)


def layouts() -> Iterator[Case]:
    """Cases with one axis alone and with several together; ring attention works on tiles in fp32 and with slopes."""
    ring = {"parallel": ParallelConfig(cp=2, cp_attention="ring"), "world_size": 2, "rank": 1}
    yield Case("llama fp32 cp2 ring tiles", fitting(example_config("llama")), dtype="fp32", most_waits=1, **ring)
    dense, experts = fitting(example_config("qwen3")), fitting(example_config("qwen3_moe"))
    latent = fitting(example_config("deepseek_v3"))
    windowed = fitting(example_config("mistral", sliding_window=5, d_head=20))
    sinks, slopes = fitting(example_config("gpt_oss")), fitting(example_config("bloom"))
    for name, config, parallel, world in (
        ("tp2", dense, {"tp": 2}, 2),
        ("tp2", experts, {"tp": 2}, 2),
        ("tp2", latent, {"tp": 2}, 2),
        ("tp2 overlap", dense, {"tp": 2, "tp_overlap": True}, 2),
        ("tp2 overlap ep2", latent, {"tp": 2, "ep": 2, "tp_overlap": True}, 2),
        ("tp2 overlap", sinks, {"tp": 2, "tp_overlap": True}, 2),
        ("cp2 ulysses", experts, {"cp": 2, "cp_attention": "ulysses"}, 2),
        ("cp2 ring", experts, {"cp": 2, "cp_attention": "ring"}, 2),
        ("cp2 ring", latent, {"cp": 2, "cp_attention": "ring"}, 2),
        ("cp4 ring", windowed, {"cp": 4, "cp_attention": "ring"}, 4),
        ("cp2 ring", sinks, {"cp": 2, "cp_attention": "ring"}, 2),
        ("cp2 ring tiles", slopes, {"cp": 2, "cp_attention": "ring"}, 2),
        ("cp2 ulysses", slopes, {"cp": 2, "cp_attention": "ulysses"}, 2),
        ("tp2", slopes, {"tp": 2}, 2),
        ("ep4", experts, {"ep": 4}, 4),
        ("ep4", latent, {"ep": 4}, 4),
        ("ep4 in 2 chunks", experts, {"ep": 4, "ep_chunks": 2}, 4),
        ("tp2 ep2 in 3 chunks", sinks, {"tp": 2, "ep": 2, "ep_chunks": 3}, 2),
        ("pp2", experts, {"pp": 2}, 2),
        ("tp2 cp2 ep4", experts, {"tp": 2, "cp": 2, "ep": 4}, 4),
        ("tp2 pp2 ep2", latent, {"tp": 2, "pp": 2, "ep": 2}, 4),
    ):
        for rank in (0, world - 1) if "pp" in name else (world - 1,):
            for recompute, fuse in (("none", plainly), ("full", compiled))[: 2 if "ep" in name else 1]:
                waits = (1 + (recompute != "none")) * config.n_layers if parallel.get("ep") else 0
                waits += "tiles" in name
                yield Case(
                    f"{config.family} {name} rank {rank} recompute={recompute}",
                    config,
                    recompute=recompute,
                    parallel=ParallelConfig(**parallel),
                    world_size=world,
                    rank=rank,
                    most_waits=waits,
                    fuse=fuse,
                )
