"""Makes a config small enough to be proven on one machine: the same architecture and axes, everything else small."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import count
from typing import Any

from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.batch_ramp import BatchRamp
from launcher.training.cpp_kernels import experts_suit
from modeling.config import NO_FAMILY, ModelConfig
from modeling.expert_layers import from_first_listed, told_once
from modeling.families.family import family_of, section_types
from modeling.init_config import MupInit
from modeling.kernels.expert_passes import UNIT
from modeling.moe_config import MoEConfig
from modeling.optimizers.config import AdamWConfig, OptimizerConfig, SGDConfig
from modeling.rope_scaling import DynamicScaling, LongRopeScaling, RopeScaling, YarnScaling
from modeling.schedules import ConstantSchedule
from parallel.config import ParallelConfig
from parallel.mesh import Degrees
from parallel.pipeline.config import Interleaved, PipelineConfig, chunks
from parallel.sizes import Sizes

CUT_AXES = ("tp", "pp", "cp")  # with dp they make up the world; ep folds over them
FEW_CHUNKS = 3  # chunks of a rank's experts at most: a first, a middle and a last one
FEW_RANKS = 8  # processes where --ranks is not given: degrees are lowered, but not below 2, to fit into so many
SEQ_LEN = 32
ORIGINAL_LENGTHS = 8  # of a rotary scaling in a sequence, where queries grow with their number
D_MODEL = 32
D_HEAD = 8
D_FF = 48
D_FF_EXPERT = 24
VOCAB_SIZE = 96
WIDTH_UNIT = 8  # rows of the experts' matrices are whole units of 16 bytes, in 16 bits
HELDOUT_ROUNDS = 2  # whole micro-batches that each rank of dp evaluates; one sequence more leaves a round to fill up
# Decay and clipping are made strong enough for a fault in them to show.
WEIGHT_DECAY = 0.1
CLIP_NORM = 0.5  # below the first gradients' norm
ADAMW_LR = 1e-3
SGD_LR = 0.1
WARMUP_STEPS = 3  # the learning rate changes from step to step
IDLE_CLIP_NORM = 1e3  # far above the gradients' norm: clipping has to leave them alone
# The shrunk model crosses all of these: several chunks of the loss and tiles of the ring, the last of them smaller, the
# ring in every second layer by pieces; weights larger and smaller than a bucket; several rounds of Muon's matrices;
# under ZeRO 3 matrices that are gathered, and norms that stay whole.
SMALL_SIZES = Sizes(
    chunk_logits=500,
    query_block=5,
    delta_chunk=7,
    ring_tile=3,
    ring_pieces_every=2,
    row_piece_bytes=500,
    row_multiple=16,  # twice what experts have in the smallest call, so that uneven ones fit, and not in the largest
    matrices=3000,
    staging_bytes=4096,
    bucket=2000,
    reduced=2000,
    page_bytes=1 << 12,
    least_offloaded_bytes=1 << 8,
    persistent=100,
    prefetched=2000,
    live=4000,
    reused=1000,
    updated=3000,
)
SAVING_SIZES = Sizes(staging_bytes=SMALL_SIZES.staging_bytes)  # a run's real sizes, but for the copy that a save makes


def default_ranks(config: RunConfig) -> int:
    """The number of processes for the layout with dp = 2, its degrees lowered to fit into FEW_RANKS where possible."""
    return 2 * _product(_cut_degrees(config.parallel, lambda product: 2 * product <= FEW_RANKS))


def shrink(config: RunConfig, world_size: int) -> RunConfig:
    """A small config of the same kind for ``world_size`` processes; its data and run directory are still to be set.

    Kept are the family, the pattern of dense and MoE layers, the kinds of router, attention and balancing, tied
    embeddings, the optimizer, the precision, recomputation, and every axis of degree above one. Raises UserError where
    the axes do not fit into ``world_size``.
    """
    parallel = shrink_parallel(config.parallel, world_size)
    degrees = Degrees.of(parallel, world_size)
    few = few_layers(config.model)
    parallel = replace(parallel, pipeline=shrink_pipeline(parallel, few))
    n_layers = sum(parallel.pipeline.layers or (min(config.model.n_layers, max(few, _n_stages(parallel))),))
    model = shrink_model(config.model, degrees, n_layers, parallel.ep_chunks, expert_width(config))
    seq_len = least_seq_len(degrees)
    micro_batch_size = min(2, config.train.micro_batch_size)
    n_micro_batches = 3 if degrees.pp == 1 else 2 * degrees.pp  # what every schedule takes
    first = degrees.dp * micro_batch_size * n_micro_batches
    small = replace(
        config,
        model=shrink_lengths(model, config, seq_len),
        data=replace(config.data, seq_len=seq_len, heldout_path=None, without=None),
        train=replace(
            config.train,
            global_batch_size=first if config.train.batch_ramp is None else 2 * first,
            batch_ramp=None if config.train.batch_ramp is None else BatchRamp(start=first, increment=first, samples=1),
            micro_batch_size=micro_batch_size,
            eval_every_steps=None,
            eval_tasks=(),
            eval_tasks_every_steps=None,
            eval_tasks_limit=None,
            eval_sequences=HELDOUT_ROUNDS * degrees.dp * micro_batch_size + 1,
        ),
        checkpoint=replace(config.checkpoint, keep_best=0),  # keep_best needs held-out losses in the run, and has none
        metrics=replace(config.metrics, expert_shares_every_steps=1),  # every step's shares are compared
        optimizer=shrink_optimizer(config.optimizer),
        schedule=ConstantSchedule(warmup_steps=WARMUP_STEPS),
        parallel=parallel,
        init_from=None,  # its weights are of another size
    )
    return small if small.train.activation_gib is None else shrink_budget(small, world_size)


def expert_width(config: RunConfig) -> int:
    """The width of a small model's experts: one that modeling.kernels.expert_passes is for, if the run's is."""
    return UNIT if experts_suit(config) else D_FF_EXPERT


def shrink_lengths(model: ModelConfig, config: RunConfig, seq_len: int) -> ModelConfig:
    """A shrunk model with its window, learned positions and rotary scaling made for ``seq_len`` tokens.

    ``config`` is the run's own, not shrunk.
    """
    return replace(
        model,
        sliding_window=_window(config, seq_len),
        max_positions=None if model.max_positions is None else seq_len,
        rope_scaling=shrink_scaling(model.rope_scaling, seq_len, model.rope_dim // 2),
    )


def least_seq_len(degrees: Degrees) -> int:
    """The tokens of a proof's sequence: SEQ_LEN, or the next number that 2 x cp x tp divides."""
    return _up_to(SEQ_LEN, 2 * degrees.cp * degrees.tp)


def shrink_budget(config: RunConfig, world_size: int) -> RunConfig:
    """The shrunk config with a new budget of activation memory: half of what recomputation can save has to be saved.

    So the layers of one proof use several kinds of recomputation, whatever the full model's budget would need.
    """
    from launcher.closed_form.budget import halfway_gib

    return replace(config, train=replace(config.train, activation_gib=halfway_gib(config, world_size)))


def few_layers(model: ModelConfig) -> int:
    """The fewest layers that keep the pattern: one dense layer before two with experts, or two of the only kind.

    Where layers with and without experts alternate, two of each, if the model has as many.
    """
    n_sparse = model.n_moe_layers
    if alternates(model):
        return min(model.n_layers, 4)
    n_dense = model.n_layers - n_sparse
    return min(1 if n_sparse else 2, n_dense) + min(2, n_sparse)


def alternates(model: ModelConfig) -> bool:
    """Whether layers with and without experts are mixed, not merely dense layers first and experts after them."""
    moe = None if model.moe is None else told_once(model.moe, model.n_layers)
    return model.n_moe_layers > 0 and moe is not None and (moe.every_n_layers > 1 or len(moe.dense_layers) > 0)


def shrink_expert_layers(model: ModelConfig, n_layers: int) -> dict[str, Any]:
    """The MoE fields that say which of ``n_layers`` layers have experts: some of each kind where the model has both.

    Groups of layers (``every_n_layers``) become pairs, and listed dense layers one, after the first with experts.
    """
    assert model.moe is not None
    moe, n_sparse = told_once(model.moe, model.n_layers), model.n_moe_layers
    if not alternates(model):
        n_dense = n_layers if n_sparse == 0 else max(min(1, moe.n_dense_layers), n_layers - n_sparse)
        return {"n_dense_layers": n_dense, "every_n_layers": 1, "dense_layers": ()}
    step = min(2, moe.every_n_layers)
    n_dense = min(1, moe.n_dense_layers) if step == 1 else 0
    listed = (n_dense + 2 * step - 1,) if moe.dense_layers else ()
    fields = {"n_dense_layers": n_dense, "every_n_layers": step, "dense_layers": listed}
    if model.family != NO_FAMILY and family_of(model.family).dense_layers_are_last:
        fields["dense_layers"] = from_first_listed(replace(moe, **fields), n_layers)
    return fields


def shrink_model(
    model: ModelConfig, degrees: Degrees, n_layers: int, ep_chunks: int = 1, expert_d_ff: int = D_FF_EXPERT
) -> ModelConfig:
    """The same kind of decoder with ``n_layers`` layers and small dims that the axes divide.

    What depends on the sequence's length, as the sliding window, is left to ``shrink_lengths``.
    """
    unit = degrees.tp * degrees.cp
    n_heads, n_kv_heads = shrink_heads(model.n_heads, model.n_kv_heads, unit)
    d_model = _up_to(D_MODEL, n_heads * D_HEAD)
    has_own_d_head = model.d_head is not None and model.d_head * model.n_heads != model.d_model
    sections = {name: shrink_section(value) for name in section_types() if (value := getattr(model, name)) is not None}
    if model.linear_attention is not None:
        linear = model.linear_attention
        n_v_heads, n_k_heads = shrink_heads(linear.n_v_heads, linear.n_k_heads, unit)
        sections["linear_attention"] = replace(shrink_section(linear), n_v_heads=n_v_heads, n_k_heads=n_k_heads)
    if model.moe is not None:
        sections["moe"] = replace(
            shrink_experts(model.moe, degrees, ep_chunks, expert_d_ff), **shrink_expert_layers(model, n_layers)
        )
    small = replace(
        shrink_section(model),
        vocab_size=min(_up_to(VOCAB_SIZE, degrees.tp), model.vocab_size),
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=2 * D_HEAD if has_own_d_head else (None if model.d_head is None else d_model // n_heads),
        d_ff=_up_to(D_FF, WIDTH_UNIT * degrees.tp),
        full_attention_layers=shrink_layers(model.full_attention_layers, model, n_layers),
        nope_layers=shrink_layers(model.nope_layers, model, n_layers),
        rope_fraction=shrink_fraction(model, 2 * D_HEAD if has_own_d_head else d_model // n_heads),
        init_std=min(
            model.init_std * (model.d_model / d_model) ** 0.5, d_model**-0.5
        ),  # layers' outputs keep their size
        **sections,
    )
    derived = {} if model.family == NO_FAMILY else family_of(model.family).derived
    small = replace(small, **{name: value(small) for name, value in derived.items()})
    return shrink_mup(small, model.init, model) if isinstance(model.init, MupInit) else small


def shrink_mup(small: ModelConfig, init: MupInit, model: ModelConfig) -> ModelConfig:
    """``small`` with the muP base widths that keep the ratio of its widths to them about what it is in ``model``."""

    def narrow(width: int, base: int | None, small_width: int) -> int | None:
        return None if base is None else max(1, round(small_width * base / width))

    base_d_model = max(1, round(small.d_model / init.ratio(model.d_model)))
    expert = None if model.moe is None or small.moe is None else (model.moe.d_ff, small.moe.d_ff)
    init = MupInit(
        base_d_model=base_d_model,
        base_d_ff=narrow(model.d_ff, init.base_d_ff, small.d_ff),
        base_expert_d_ff=None if expert is None else narrow(expert[0], init.base_expert_d_ff, expert[1]),
    )
    return replace(
        small,
        init=init,
        logit_divisor=init.ratio(small.d_model) if small.tie_embeddings else small.logit_divisor,
    )


def shrink_scaling(scaling: RopeScaling | None, seq_len: int, n_pairs: int) -> RopeScaling | None:
    """The same scaling, with its original length raised to ``seq_len`` where sequences have to be within it.

    Where queries grow with their positions, it is lowered, so that they do within a sequence. Of LongRoPE's factors,
    one for each pair of channels, ``n_pairs`` remain, taken evenly from the first on.
    """
    if isinstance(scaling, YarnScaling) and scaling.query_growth:
        shortened = min(scaling.original_seq_len, seq_len // ORIGINAL_LENGTHS)
        return replace(shrink_section(scaling), original_seq_len=shortened)
    if not isinstance(scaling, DynamicScaling | LongRopeScaling):
        return scaling
    scaling = replace(scaling, original_seq_len=max(seq_len, scaling.original_seq_len))
    if not isinstance(scaling, LongRopeScaling):
        return scaling
    short, long = (
        tuple(factors[pair * len(factors) // n_pairs] for pair in range(n_pairs))
        for factors in (scaling.short_factor, scaling.long_factor)
    )
    return replace(scaling, short_factor=short, long_factor=long)


def shrink_fraction(model: ModelConfig, d_head: int) -> float:
    """``rope_fraction`` for a head of ``d_head`` channels: about the model's, in whole pairs, at least one."""
    return 1.0 if model.rope_fraction == 1 else max(2, 2 * round(model.rope_fraction * d_head / 2)) / d_head


def shrink_layers(layers: tuple[int, ...], model: ModelConfig, n_layers: int) -> tuple[int, ...]:
    """The listed layers of the shrunk model: the last one where ``layers`` lists some, else none or all as there."""
    n_listed = len(layers)
    return tuple(range(n_layers)) if n_listed == model.n_layers else tuple(range(n_layers)[-1:]) if n_listed else ()


def shrink_section(section: Any) -> Any:
    """The config section with each number limited to its field's metadata: at most ``small``, at least ``strong``.

    Numbers that are 0 or None stay, since they switch something off.
    """
    values = {
        each.name: max(min(value, each.metadata.get("small", value)), each.metadata.get("strong", 0))
        for each in fields(section)
        if {"small", "strong"} & each.metadata.keys() and (value := getattr(section, each.name))
    }
    return replace(section, **values)


def shrink_heads(n_heads: int, n_kv_heads: int, unit: int) -> tuple[int, int]:
    """Small numbers of heads and key-value heads of the same ratio, as divisible by ``unit`` (tp x cp) as the model's.

    A ratio above four becomes the smallest above one that fits. For linear attention, they are the numbers of value
    heads and key heads.
    """
    ratio = n_heads // n_kv_heads
    n_kv_heads = max(math.gcd(n_kv_heads, unit), min(2, n_kv_heads))
    small = ratio if ratio <= 4 else 2
    while n_kv_heads * small % unit and small < ratio:
        small += 1
    return n_kv_heads * small, n_kv_heads


def shrink_experts(moe: MoEConfig, degrees: Degrees, ep_chunks: int = 1, expert_d_ff: int = D_FF_EXPERT) -> MoEConfig:
    """Few and narrow experts, some for each chunk of ep; the router is kept, and the balancing rule made stronger."""
    small: MoEConfig = shrink_section(moe)
    least, step = max(4, 2 * small.top_k), degrees.ep
    sizes = (replace(small, n_experts=number) for number in count(step * ep_chunks, step))
    few = next(each for each in sizes if each.choosable >= least and not [*each.problems()])
    if moe.top_k == moe.n_experts <= few.n_experts:  # all are chosen
        few = replace(few, top_k=few.choosable)
    own = replace(few, n_experts=moe.n_experts, top_k=min(few.top_k, moe.n_experts))
    if moe.n_experts < few.n_experts and moe.n_experts % degrees.ep == 0 and not [*own.problems()]:
        few = own
    return replace(
        few,
        d_ff=_up_to(expert_d_ff, WIDTH_UNIT * degrees.tp),
        shared_d_ff=None if moe.shared_d_ff is None else _up_to(2 * D_FF_EXPERT, WIDTH_UNIT * degrees.tp),
        balance=shrink_section(moe.balance),
    )


def shrink_optimizer(optimizer: OptimizerConfig) -> OptimizerConfig:
    """The same update rule with a learning rate for small models, and decay and clipping, if any, that take effect."""
    lr = SGD_LR if isinstance(optimizer, SGDConfig) else ADAMW_LR
    clip_norm = None if optimizer.clip_norm is None else min(optimizer.clip_norm, CLIP_NORM)
    weight_decay = max(optimizer.weight_decay, WEIGHT_DECAY) if optimizer.weight_decay else 0.0
    return replace(optimizer, lr=lr, clip_norm=clip_norm, weight_decay=weight_decay)


def sgd_for(optimizer: OptimizerConfig) -> SGDConfig:
    """SGD with momentum, which is linear in the gradients, with the (shrunk) optimizer's clipping and weight decay."""
    if isinstance(optimizer, SGDConfig):
        return optimizer
    same = {name: getattr(optimizer, name) for name in ("weight_decay", "decay_embeddings", "clip_norm")}
    return SGDConfig(lr=SGD_LR, momentum=0.9, **same)


def nonlinear_for(optimizer: OptimizerConfig) -> OptimizerConfig:
    """The (shrunk) optimizer in fp32, or AdamW with the same decay where that is SGD.

    If it clips, then at a norm that gradients do not reach, so that clipping must leave them alone.
    """
    if isinstance(optimizer, SGDConfig):
        same = {name: getattr(optimizer, name) for name in ("weight_decay", "decay_embeddings", "clip_norm")}
        optimizer = AdamWConfig(lr=ADAMW_LR, **same)
    return replace(optimizer.exact(), clip_norm=None if optimizer.clip_norm is None else IDLE_CLIP_NORM)


def shrink_parallel(parallel: ParallelConfig, world_size: int) -> ParallelConfig:
    """The axes at degrees that fit into ``world_size`` processes, lowered to leave dp = 2 if possible.

    A degree above one stays above one. Raises UserError where the degrees cannot be made to fit.
    """
    cut = _cut_degrees(parallel, lambda product: 2 * product <= world_size and world_size % product == 0)
    unit = _product(cut)
    ep = parallel.ep
    small_ep = max((number for number in range(2, ep + 1) if world_size // cut["pp"] % number == 0), default=1)
    if world_size % unit or (ep > 1 and small_ep == 1):
        raise UserError([_ranks_problem(cut, ep, world_size, unit)])
    chunks = min(parallel.ep_chunks, FEW_CHUNKS) if small_ep > 1 else 1
    return replace(parallel, tp=cut["tp"], pp=cut["pp"], cp=cut["cp"], ep=small_ep, ep_chunks=chunks)


def _ranks_problem(cut: dict[str, int], ep: int, world_size: int, unit: int) -> str:
    held = [f"parallel.{name}={degree}" for name, degree in cut.items() if degree > 1]
    if world_size % unit == 0:
        return f"--ranks={world_size} must be a multiple of 2 to hold parallel.ep={ep}; try {2 * unit}"
    below = world_size // unit * unit
    tries = f"{below} or {below + unit}" if below else str(unit)
    return f"--ranks={world_size} must be a multiple of {' x '.join(held)} = {unit} (the least degrees); try {tries}"


def _cut_degrees(parallel: ParallelConfig, fits: Callable[[int], bool]) -> dict[str, int]:
    """tp, pp and cp, the largest lowered again and again until their product ``fits``, or all are 2 or less."""
    degrees = {name: int(getattr(parallel, name)) for name in CUT_AXES}
    while not fits(_product(degrees)):
        largest = max(degrees, key=lambda name: degrees[name])
        if degrees[largest] <= 2:
            break
        degrees[largest] = max((n for n in range(2, degrees[largest]) if degrees[largest] % n == 0), default=2)
    return degrees


def _product(degrees: dict[str, int]) -> int:
    return math.prod(degrees[name] for name in CUT_AXES)


def _n_stages(parallel: ParallelConfig) -> int:
    return parallel.pp * chunks(parallel.pipeline) if parallel.pp > 1 else 1


def shrink_pipeline(parallel: ParallelConfig, least_layers: int) -> PipelineConfig:
    """The same schedule, with at most two chunks a rank. ``parallel`` is shrunk already.

    Where the config lists the stages' layers, a stage gets one layer, or two if its number in the list is above the
    smallest; then all get more until there are at least ``least_layers``.
    """
    pipeline = parallel.pipeline
    if isinstance(pipeline, Interleaved):
        pipeline = replace(pipeline, n_chunks=min(2, pipeline.n_chunks))
    given = pipeline.layers
    if given is None or parallel.pp == 1:
        return replace(pipeline, layers=None)
    n_stages = parallel.pp * chunks(pipeline)
    small = [1 + (given[stage * len(given) // n_stages] > min(given)) for stage in range(n_stages)]
    while sum(small) < least_layers:
        small = [number + 1 for number in small]
    return replace(pipeline, layers=tuple(small))


def _window(config: RunConfig, seq_len: int) -> int | None:
    """The sliding window for ``seq_len`` tokens, as large a part of the sequence as in ``config``."""
    window = config.model.sliding_window
    if window is None:
        return None
    return max(2, round(window * seq_len / config.data.seq_len))


def _up_to(least: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is at least ``least``."""
    return -(-least // unit) * unit
