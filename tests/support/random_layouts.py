"""Random valid configs: models of random sizes under random layouts."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from data.config import DataConfig
from launcher.config.layout_rules import dp_of
from launcher.config.rules import check
from launcher.config.tree import RunConfig, TrainConfig
from modeling.config import FAMILIES, ModelConfig
from modeling.families.family import family_of
from modeling.moe_config import BiasBalance, MoEConfig, NoBalance, SequenceAuxBalance
from modeling.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from modeling.schedules import ConstantSchedule
from parallel.config import ParallelConfig
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB, chunks
from small_models import GROWING, MOE_FAMILIES, with_told_together

RANKS = (2, 3, 4, 4, 6, 6, 8, 8)
TRIES = 3000
DENSE, OF_EXPERTS = ["llama"], ["mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"]
MOST_MICRO_BATCHES = 12  # more take minutes under ZeRO 3 with pp


def random_run(seed: int) -> tuple[RunConfig, int]:
    """A valid config and its number of processes, determined by ``seed`` as long as the rules do not change.

    Its data section names no files: a proof brings its own data.
    """
    draw = random.Random(seed)
    while True:
        n_ranks = draw.choice(RANKS)
        parallel = draw_parallel(draw, n_ranks)
        family = draw.choice([*OF_EXPERTS, *(DENSE if parallel.ep == 1 else OF_EXPERTS[-1:])])
        for _ in range(TRIES):  # few models are valid; models are redrawn first, so that layouts stay evenly drawn
            config = draw_config(draw, n_ranks, parallel, family)
            if not check(config, n_ranks) and micro_batches(config, n_ranks) <= MOST_MICRO_BATCHES:
                return config, n_ranks


def first_run(wanted: Callable[[RunConfig, int], bool]) -> tuple[RunConfig, int]:
    """The run of the first seed, from 0 on, for which ``wanted`` is true."""
    return next(run for run in map(random_run, itertools.count()) if wanted(*run))


def random_family_run(seed: int) -> tuple[RunConfig, int]:
    """The layout and sizes of ``random_run(seed)``, with biases, norms, windows and positions of a random family."""
    config, n_ranks = random_run(seed)
    if config.train.precision == "fp16":  # in which the gradients of some of these models overflow, or vanish
        config = replace(config, train=replace(config.train, precision="bf16"))
    draw = random.Random(seed)
    kinds = [name for name in FAMILIES if (name in MOE_FAMILIES) == (config.model.moe is not None)]
    while True:
        drawn = replace(config, model=draw_features(draw, config.model, draw.choice(kinds)))
        if not check(drawn, n_ranks):
            return drawn, n_ranks


def draw_features(draw: random.Random, model: ModelConfig, family: Any) -> ModelConfig:
    """A model of these sizes and this family, with the features that the family always has; often not a valid one."""
    pick, told = draw.choice, family_of(family)
    fixed = {key: values[0] for key, values in told.expressible.items() if len(values) == 1}
    moe = model.moe
    if moe is not None:
        shared = {"n_shared_experts": 1, "shared_d_ff": 8 * pick([1, 3])} if family == "qwen2_moe" else {}
        shared |= {"swiglu_limit": 0.5} if family == "gpt_oss" else {}
        inside = {key.partition(".")[2]: value for key, value in fixed.items() if key.startswith("moe.")}
        inside = {key: value for key, value in (inside | shared).items() if "." not in key}
        moe = replace(moe, balance=pick([NoBalance(), moe.balance]), **inside)
    drawn = replace(
        model,
        family=family,
        moe=moe,
        qk_norm=pick([True, False]),
        qkv_bias=pick([True, False]),
        o_bias=pick([True, False]),
        ff_bias=pick([True, False]),
        sliding_window=pick([None, 5]),
        rope_fraction=pick([1.0, 2 / model.head_dim]),
        local_rope_theta=pick([None, 100.0]),
        rope_scaling=pick([None, LinearScaling(factor=3.0), Llama3Scaling(original_seq_len=20), YarnScaling()]),
    )
    if family_of(family).scales_queries:
        drawn = replace(drawn, rope_scaling=GROWING)
    elif drawn.rope_scaling is not None and drawn.rope_scaling.name not in family_of(family).rope_scalings:
        drawn = replace(drawn, rope_scaling=None)
    if drawn.sliding_window is not None:
        drawn = replace(drawn, full_attention_layers=pick([(), (model.n_layers - 1,)]))
    return with_told_together(replace(drawn, **{key: value for key, value in fixed.items() if "." not in key}))


def micro_batches(config: RunConfig, n_ranks: int) -> int:
    """The number of micro-batches of one rank in one step."""
    return config.train.global_batch_size // (dp_of(config, n_ranks) * config.train.micro_batch_size)


def draw_config(draw: random.Random, n_ranks: int, parallel: ParallelConfig, family: str) -> RunConfig:
    """A random config under the layout, mostly not a valid one."""
    pick = draw.choice
    zero_free = pick(["fp32", "bf16", "fp16"])
    return RunConfig(
        seed=draw.randrange(1000),
        model=draw_model(draw, parallel, family),
        data=DataConfig(seq_len=pick([12, 16, 20, 24, 36, 48])),
        train=TrainConfig(
            global_batch_size=n_ranks * pick([1, 2, 3, 4]),
            micro_batch_size=pick([1, 1, 2, 3]),
            precision="fp32" if parallel.zero == 0 else zero_free,
            recompute=pick(["none", "selective", "feed_forward", "full"]),
        ),
        schedule=ConstantSchedule(),
        parallel=parallel,
    )


def draw_parallel(draw: random.Random, n_ranks: int) -> ParallelConfig:
    """Random degrees that divide the number of processes, and random ZeRO stage, cp attention and schedule."""
    degrees: dict[str, int] = {}
    left = n_ranks
    for axis in draw.sample(["tp", "cp", "pp"], 3):
        degrees[axis] = draw.choice([degree for degree in (1, 2, 3, 4) if left % degree == 0])
        left //= degrees[axis]
    stage = n_ranks // degrees["pp"]
    schedules: list[Callable[[], Any]] = [OneFOneB, Interleaved, ZBV, DualPipeV]
    return ParallelConfig(
        **degrees,
        ep=draw.choice([degree for degree in range(1, stage + 1) if stage % degree == 0]),
        zero=draw.choice([0, 1, 1, 2, 3]),
        cp_attention=draw.choice(["ulysses", "ring"]),
        pipeline=draw.choice(schedules)() if degrees["pp"] > 1 else OneFOneB(),
    )


def draw_model(draw: random.Random, parallel: ParallelConfig, family: Any) -> ModelConfig:
    """A random decoder of unusual sizes, chosen so that tp, cp, ep and pp may fit."""
    pick = draw.choice
    n_kv_heads = parallel.tp * pick([1, 1, 2, 3])
    d_head = 2 * pick([2, 3, 4, 5])
    n_layers = max(1, parallel.pp * chunks(parallel.pipeline) + pick([-1, 0, 1, 2]))
    moe = None
    if family in OF_EXPERTS:
        n_experts = parallel.ep * pick([1, 2, 3])
        score = pick(["softmax", "sigmoid"])
        balances = [SequenceAuxBalance(coefficient=0.05), NoBalance(), BiasBalance(rate=0.01)]
        moe = MoEConfig(
            n_experts=n_experts,
            top_k=min(n_experts, pick([1, 2, 3])),
            d_ff=pick([6, 10, 24]),
            n_shared_experts=pick([0, 0, parallel.tp]),
            n_dense_layers=pick([0, 0, 1]),
            score=score,
            normalize_top_k=pick([True, False]),
            routed_scale=pick([1.0, 2.5]),
            balance=pick(balances),
            z_loss=pick([0.0, 1e-2]),
        )
    return ModelConfig(
        family=family,
        vocab_size=parallel.tp * pick([37, 50, 64]),
        d_model=2 * pick([9, 12, 16, 25]),
        n_layers=n_layers,
        n_heads=n_kv_heads * pick([1, 2, 3]),
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_ff=parallel.tp * pick([11, 16, 24]),
        tie_embeddings=pick([True, False]),
        qk_norm=pick([True, False]),
        sliding_window=pick([None, None, 5]),
        moe=moe,
    )
