"""Random valid configs with random switches of layout and training, and random blocks of the model.

They extend the runs of random_layouts.py.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from launcher.closed_form.budget import halfway_gib
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.training.batch_ramp import BatchRamp
from modeling.config import AttentionGate, MLAConfig
from modeling.init_config import HeInit, MupInit, NormalInit, XavierInit
from modeling.mtp_config import MTPConfig
from modeling.optimizers.muon import MuonConfig
from modeling.optimizers.sgd import SGDConfig
from modeling.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from parallel.config import ParallelConfig
from random_layouts import RANKS, draw_parallel, random_run
from small_models import GROWING

TRIES = 300

# Changes a config with its number of processes; returns it unchanged where the change does not apply.
Change = Callable[[random.Random, RunConfig, int], RunConfig]

SWITCHES: dict[str, list[Any]] = {
    "parallel.tp_overlap": [True],
    "parallel.ep_overlap": [False],
    "parallel.ep_chunks": [2, 3],
    "parallel.offload_optimizer": [True],
    "parallel.grad_reduce": ["last_micro_batch", "micro_batch"],
    "parallel.grad_reduce_dtype": ["bf16"],
    "train.offload_activations": [True],
    "train.fp8_keep_weights": [True],
    "optimizer": [SGDConfig(), MuonConfig()],
}
BLOCKS: dict[str, list[Any]] = {
    "model.norm": ["layer"],
    "model.norm_placement": ["post", "both"],
    "model.norm_adds_one": [True],
    "model.embedding_norm": [True],
    "model.parallel_block": [True],
    "model.qk_norm": [True],
    "model.qk_norm_over": ["all_heads"],
    "model.qkv_bias": [True],
    "model.o_bias": [True],
    "model.ff_bias": [True],
    "model.ff_gated": [False],
    "model.activation": ["gelu", "gelu_tanh", "relu", "relu2"],
    "model.embedding_scale": [3.0],
    "model.residual_scale": [0.5],
    "model.logit_divisor": [2.0],
    "model.score_cap": [5.0],
    "model.logit_cap": [4.0],
    "model.sinks": [True],
    "model.positions": ["alibi", "sinusoidal", "t5", "none"],
    "model.nope_layers": [(0,)],
    "model.rope_fraction": [0.5],
    "model.sliding_window": [5],
    "model.full_attention_layers": [(0,)],
    "model.embedding_dropout": [0.2],
    "model.residual_dropout": [0.2],
    "model.attention_dropout": [0.2],
    "model.z_loss": [1e-2],
    "model.mtp": [MTPConfig(depth=1), MTPConfig(depth=2)],
    "model.moe.expert_bias": [True],
    "model.moe.swiglu_limit": [0.5],
    "model.moe.shared_gate": [True],
    "model.moe.logit_bias": [True],
    "model.moe.every_n_layers": [2],
}

FURTHER: dict[str, list[Any]] = {
    "model.rope_scaling": [
        LinearScaling(factor=3.0),
        Llama3Scaling(original_seq_len=20),
        YarnScaling(original_seq_len=8, factor=2.0),
        YarnScaling(original_seq_len=8, mscale=1.0, mscale_all_dim=0.7, truncate=False),
        GROWING,
        DynamicScaling(original_seq_len=8, factor=2.0),
    ],
    "model.local_rope_theta": [100.0],
    "model.init": [NormalInit(), XavierInit(distribution="normal"), HeInit()],
    "model.score_scale": [0.4],
    "model.score_channels": [7.0],
    "model.norm_eps": [1e-2],
    "model.t5_buckets": [6],
    "model.t5_max_distance": [10],
    "model.moe.dense_layers": [(0,), (1,)],
    "optimizer.decay_embeddings": [True],
    "optimizer.weight_decay": [0.5],
    "optimizer.clip_norm": [None, 0.05],
}


def random_switched_run(seed: int) -> tuple[RunConfig, int]:
    """The layout and sizes of ``random_run(seed)`` with random switches that are valid together."""
    config, n_ranks = random_run(seed)
    draw = random.Random(f"switches {seed}")
    return drawn(draw, config, n_ranks, [*map(setting, SWITCHES.items()), in_8_bits, within_a_budget, grown]), n_ranks


def random_free_run(seed: int) -> tuple[RunConfig, int]:
    """The run of ``random_switched_run(seed)`` with random model blocks that are valid together, of no family."""
    config, n_ranks = random_switched_run(seed)
    draw = random.Random(f"blocks {seed}")
    config = replace(config, model=replace(config.model, family="none"))
    if config.train.precision == "fp16":  # in which the gradients of some of these models overflow, or vanish
        config = with_value(config, "train.precision", "bf16")
    config = drawn(draw, config, n_ranks, [*map(setting, BLOCKS.items()), grouped, latent, placed])
    return normed_late(seed, gated(seed, config, n_ranks), n_ranks), n_ranks


def gated(seed: int, config: RunConfig, n_ranks: int) -> RunConfig:
    """The config with random gates on attention's output, or none.

    Drawn from a generator of its own, so that the other draws of a seed stay as they were.
    """
    kind = random.Random(f"gates {seed}").choice(get_args(AttentionGate))
    changed = with_value(config, "model.attention_gate", kind)
    return config if check(changed, n_ranks) else changed


def normed_late(seed: int, config: RunConfig, n_ranks: int) -> RunConfig:
    """The config of half of the seeds with queries and keys normed after they turn, where they are normed and turn.

    Drawn from a generator of its own, as the gates are.
    """
    changed = with_value(config, "model.qk_norm_after_rope", random.Random(f"late norms {seed}").choice([True, False]))
    return config if check(changed, n_ranks) else changed


def random_further_run(seed: int) -> tuple[RunConfig, int]:
    """The run of ``random_free_run(seed)`` with random initialization, RoPE scaling, scores' and updates' details."""
    config, n_ranks = random_free_run(seed)
    draw = random.Random(f"further {seed}")
    config = drawn(draw, config, n_ranks, [*map(setting, FURTHER.items()), longer, wider])
    return iterated(config, n_ranks), n_ranks


def random_resume(seed: int) -> tuple[RunConfig, int, RunConfig, int]:
    """One fp32 run under two layouts with their own switches, to save under the first and resume under the second."""
    config, n_ranks = random_free_run(seed)
    config = replace(
        config,
        parallel=replace(config.parallel, grad_reduce_dtype="fp32"),
        train=replace(config.train, precision="fp32", fp8_keep_weights=False, activation_gib=None),
    )
    draw = random.Random(f"resume {seed}")
    config = drawn(draw, config, n_ranks, [within_a_budget])
    train = replace(config.train, activation_gib=None)
    other, n_others = replace(config, parallel=ParallelConfig(), train=train), 1  # where few layouts fit the model
    for _ in range(TRIES):
        ranks = draw.choice(RANKS)
        train = replace(
            config.train,
            micro_batch_size=draw.choice([1, 1, 2, 3]),
            recompute=draw.choice(["none", "selective", "feed_forward", "full"]),
            activation_gib=None,
            offload_activations=False,
        )
        tried = replace(config, parallel=draw_parallel(draw, ranks), train=train)
        if not check(tried, ranks):
            other, n_others = tried, ranks
            break
    switches = [setting(item) for item in SWITCHES.items() if item[0] != "optimizer"]
    return config, n_ranks, drawn(draw, other, n_others, [*switches, within_a_budget]), n_others


def drawn(draw: random.Random, config: RunConfig, n_ranks: int, changes: list[Change]) -> RunConfig:
    """The config after a random half of the changes, one after another, without those that the rules forbid.

    All chosen changes are tried twice, since one may be valid only after another.
    """
    chosen = [change for change in changes if draw.random() < 0.5]
    for change in [*draw.sample(chosen, len(chosen)), *chosen]:
        changed = change(draw, config, n_ranks)
        if not check(changed, n_ranks):
            config = changed
    return config


def setting(item: tuple[str, list[Any]]) -> Change:
    """The change that sets a key to one of the values; keys of experts only in models with experts."""
    key, values = item

    def change(draw: random.Random, config: RunConfig, _: int) -> RunConfig:
        if key.startswith("model.moe.") and config.model.moe is None:
            return config
        return with_value(config, key, draw.choice(values))

    return change


def with_value(section: Any, key: str, value: Any) -> Any:
    """A copy of the section in which the dotted ``key`` has the value."""
    name, _, rest = key.partition(".")
    return replace(section, **{name: with_value(getattr(section, name), rest, value) if rest else value})


def in_8_bits(_: random.Random, config: RunConfig, n_ranks: int) -> RunConfig:
    """The config with precision fp8, and widths that are multiples of 16 on each rank as fp8 needs."""
    unit = 16 * config.parallel.tp
    model, moe = config.model, config.model.moe
    if moe is not None:
        moe = replace(moe, d_ff=16, shared_d_ff=unit if moe.n_shared_experts else None)
    model = replace(model, d_model=48, d_head=16, d_ff=unit, moe=moe)
    return replace(config, model=model, train=replace(config.train, precision="fp8"))


def within_a_budget(_: random.Random, config: RunConfig, n_ranks: int) -> RunConfig:
    """The config with an activation budget under which layers recompute in various ways."""
    free = replace(config, train=replace(config.train, recompute="none", activation_gib=1.0))
    return config if check(free, n_ranks) else with_value(free, "train.activation_gib", halfway_gib(free, n_ranks))


def grown(_: random.Random, config: RunConfig, n_ranks: int) -> RunConfig:
    """The config with a batch ramp that starts at half of the batch size."""
    half = config.train.global_batch_size // 2
    return with_value(config, "train.batch_ramp", BatchRamp(start=half, increment=half, samples=1))


def iterated(config: RunConfig, n_ranks: int) -> RunConfig:
    """The config with Muon's iterations in bf16, where that is valid."""
    if config.optimizer.name != "muon":
        return config
    low = with_value(config, "optimizer.iteration_dtype", "bf16")
    return config if check(low, n_ranks) else low


def grouped(draw: random.Random, config: RunConfig, _: int) -> RunConfig:
    """The config with experts in groups, of which each token first chooses some."""
    moe = config.model.moe
    if moe is None:
        return config
    group = {"n_groups": 2, "top_k_groups": draw.choice([1, 2]), "group_score": draw.choice(["best_two", "best"])}
    return with_value(config, "model.moe", replace(moe, **group))


def latent(_: random.Random, config: RunConfig, __: int) -> RunConfig:
    """The config with multi-head latent attention, where every head has keys of its own."""
    mla = MLAConfig(kv_lora_rank=10, q_lora_rank=14, d_nope=6, d_rope=4, d_v=8)
    model = config.model
    return replace(config, model=replace(model, mla=mla, n_kv_heads=model.n_heads, d_head=None, qk_norm=False))


def placed(_: random.Random, config: RunConfig, __: int) -> RunConfig:
    """The config with learned positions, with a table as long as a sequence."""
    return replace(config, model=replace(config.model, positions="learned", max_positions=config.data.seq_len))


def longer(_: random.Random, config: RunConfig, __: int) -> RunConfig:
    """The config with LongRoPE scaling, which slows each pair of channels by its own factor."""
    model = config.model
    n_pairs = int((model.mla.d_rope if model.mla else model.head_dim) * model.rope_fraction) // 2
    short, long = (tuple(first + 0.5 * pair for pair in range(n_pairs)) for first in (1.0, 2.0))
    scaling = LongRopeScaling(original_seq_len=8, longest_seq_len=64, short_factor=short, long_factor=long)
    return with_value(config, "model.rope_scaling", scaling)


def wider(draw: random.Random, config: RunConfig, _: int) -> RunConfig:
    """The config with muP initialization relative to a base model that is narrower by a factor of 2 or 3."""
    return with_value(config, "model.init", MupInit(base_d_model=config.model.d_model // draw.choice([2, 3])))
