"""The rules between a config's values, all in one place: every problem at once, before anything is created."""

import math
import os
from collections.abc import Iterator
from typing import Any

from data.places import why_no_path
from launcher.config.families import check_family
from launcher.config.layout_rules import check_layout, dp_of
from launcher.config.tree import RunConfig
from launcher.config.words import join_or, show
from launcher.slurm.rules import check_slurm
from modeling.schedules import WSDSchedule

_AT_LEAST: dict[str, tuple[float, float]] = {  # key: (smallest legal value, value to try)
    "seed": (0, 0),
    "model.vocab_size": (1, 8192),
    "model.d_model": (1, 512),
    "model.n_layers": (1, 8),
    "model.n_heads": (1, 8),
    "model.n_kv_heads": (1, 1),
    "model.d_head": (1, 64),
    "model.d_ff": (1, 1408),
    "model.sliding_window": (1, 1024),
    "model.moe.n_experts": (1, 8),
    "model.moe.top_k": (1, 1),
    "model.moe.d_ff": (1, 512),
    "model.moe.n_shared_experts": (0, 0),
    "model.moe.n_dense_layers": (0, 0),
    "model.moe.balance.coefficient": (0, 0.001),
    "model.moe.balance.rate": (0, 0.001),
    "model.moe.z_loss": (0, 0.0001),
    "data.seq_len": (1, 1024),
    "train.steps": (1, 1000),
    "train.micro_batch_size": (1, 1),
    "train.eval_every_steps": (1, 100),
    "train.eval_sequences": (1, 64),
    "train.gc_every_steps": (1, 100),
    "train.timeout_seconds": (1, 600),
    "train.step_timeout_seconds": (1, 540),
    "train.start_seconds": (1, 300),
    "optimizer.lr": (0, 0.0003),
    "optimizer.weight_decay": (0, 0.1),
    "schedule.warmup_steps": (0, 0),
    "schedule.decay_steps": (0, 0),
    "parallel.tp": (1, 1),
    "parallel.cp": (1, 1),
    "parallel.pp": (1, 1),
    "parallel.ep": (1, 1),
    "checkpoint.every_steps": (1, 100),
    "checkpoint.keep_last": (1, 3),
    "checkpoint.keep_every_steps": (1, 1000),
    "checkpoint.keep_best": (0, 0),
    "checkpoint.timeout_seconds": (1, 1800),
    "slurm.nodes": (1, 1),
    "slurm.gpus_per_node": (0, 8),
    "slurm.tasks_per_node": (1, 8),
    "slurm.cpus_per_task": (1, 8),
    "slurm.time_minutes": (1, 1440),
    "slurm.notice_seconds": (1, 300),
    "slurm.chain": (1, 1),
    "slurm.restarts": (0, 3),
    "slurm.spare_nodes": (0, 1),
    "health.spike_window": (2, 100),
    "health.max_skips": (0, 10),
    "health.max_rollbacks": (0, 3),
}
_ABOVE_ZERO: dict[str, float] = {  # key: value to try
    "model.rope_theta": 10000.0,
    "model.norm_eps": 1e-6,
    "model.init_std": 0.02,
    "model.moe.routed_scale": 1.0,
    "optimizer.eps": 1e-8,
    "optimizer.clip_norm": 1.0,
    "health.spike_z": 8.0,
}
_BELOW_ONE: dict[str, float] = {"optimizer.beta1": 0.9, "optimizer.beta2": 0.95, "optimizer.momentum": 0.9}
_NULLABLE = (
    "model.d_head",
    "model.sliding_window",
    "train.eval_every_steps",
    "train.step_timeout_seconds",
    "optimizer.clip_norm",
    "checkpoint.every_steps",
    "checkpoint.keep_every_steps",
    "slurm.tasks_per_node",
    "slurm.cpus_per_task",
)


def check(config: RunConfig, world_size: int) -> list[str]:
    """Every rule that ``config`` breaks on ``world_size`` processes, one line each; empty where it can run.

    A line names each key involved with its value, the rule, and a remedy. Rules of the data itself (paths, weights)
    are ``data.rules.check_data``'s.
    """
    lines = [*_check_ranges(config), *_check_names(config)]
    broken = {line.partition("=")[0] for line in lines}
    relations = [
        *_check_batch(config, world_size),
        *_check_attention(config),
        *_check_experts(config),
        *_check_expert_widths(config),
        *_check_schedule(config),
        *_check_precision(config),
        *_check_evaluation(config),
        *_check_retention(config),
        *check_family(config.model),
        *check_layout(config, world_size),
        *check_slurm(config.slurm),
    ]
    return lines + [line for line in relations if line.partition("=")[0] not in broken]


def _values(config: RunConfig, key: str) -> Iterator[Any]:
    """The value at a dotted key, or nothing where it is null or its section has no such key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    if value is not None:
        yield value


def _check_ranges(config: RunConfig) -> Iterator[str]:
    """Single values outside their range."""
    for key, (minimum, usual) in _AT_LEAST.items():
        for value in _values(config, key):
            if value < minimum:
                yield f"{key}={value} must be at least {minimum}; try {_or_null(key, usual)}"
    for key, usual in _ABOVE_ZERO.items():
        for value in _values(config, key):
            if value <= 0:
                yield f"{key}={value} must be above 0; try {_or_null(key, usual)}"
    for key, usual in _BELOW_ONE.items():
        for value in _values(config, key):
            if not 0 <= value < 1:
                yield f"{key}={value} must be at least 0 and below 1; try {usual}"
    for value in _values(config, "schedule.min_ratio"):
        if not 0 <= value <= 1:
            yield f"schedule.min_ratio={value} must be between 0 and 1; try 0.1"
    if not 0 <= config.parallel.zero <= 3:
        yield f"parallel.zero={config.parallel.zero} must be 0, 1, 2 or 3; try 1"


def _or_null(key: str, usual: float) -> str:
    return f"{usual} or null" if key in _NULLABLE else f"{usual}"


def _check_names(config: RunConfig) -> Iterator[str]:
    """The run's name and directory can be a path."""
    name = config.name
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        letters = "".join(letter if letter.isprintable() and letter not in "/\\" else "-" for letter in name).strip(
            ".-"
        )
        yield f"name={show(name)} must be one folder's name, without path separators; try {show(letters or 'run')}"
    elif (reason := why_no_path(name)) is not None:
        yield f"name={show(name)} {reason}; try {show(name[:40])}"
    for key, path, usual in (
        ("run_dir", config.run_dir, "null (runs/NAME)"),
        ("checkpoint.dir", config.checkpoint.dir, "null (RUN_DIR/checkpoints)"),
    ):
        if path is not None:
            reason = why_no_path(path, of_ours=True) if path and path.isprintable() else "must be a path"
            if reason is not None:
                yield f"{key}={show(path)} {reason}; try {usual}"


def _check_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    """The global batch splits evenly over the ranks and their micro-batches."""
    train = config.train
    dp = dp_of(config, world_size)
    share = dp * train.micro_batch_size
    if share < 1:
        return
    if train.global_batch_size < 1 or train.global_batch_size % share:
        below = train.global_batch_size // share * share
        near = f"{below} or {below + share}" if below > 0 else str(share)
        yield (
            f"train.global_batch_size={train.global_batch_size} must be a multiple of dp={dp} x "
            f"train.micro_batch_size={train.micro_batch_size} = {share}; try {near}"
        )


def _check_attention(config: RunConfig) -> Iterator[str]:
    """Heads divide evenly, and rotary embedding finds channels in pairs."""
    model = config.model
    d_model, n_heads, n_kv_heads, d_head = model.d_model, model.n_heads, model.n_kv_heads, model.d_head
    if min(d_model, n_heads, n_kv_heads) < 1:
        return
    if n_heads % n_kv_heads:
        tries = join_or(list(map(str, _divisors_near(n_heads, n_kv_heads))))
        yield f"model.n_kv_heads={n_kv_heads} must divide model.n_heads={n_heads}; try {tries}"
    if d_head is not None and d_head % 2:
        yield f"model.d_head={d_head} must be even (rotary embedding turns channels in pairs); try {d_head + 1}"
    if d_head is None and d_model % (2 * n_heads):
        yield (
            f"model.d_model={d_model} must be a multiple of 2 x model.n_heads={n_heads} = {2 * n_heads} where "
            f"model.d_head=null (rotary embedding turns channels in pairs); "
            f"try {_nearest_multiple(d_model, _d_model_step(config))}, or set model.d_head"
        )


def _divisors_near(number: int, value: int) -> list[int]:
    """The divisors of ``number`` next to ``value``, on either side."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    below = [n for n in divisors if n < value][-1:]
    return below + [n for n in divisors if n > value][:1]


def _check_experts(config: RunConfig) -> Iterator[str]:
    """The router can choose top_k experts, and the dense layers fit into the model."""
    moe, n_layers = config.model.moe, config.model.n_layers
    if moe is None:
        return
    if moe.top_k > moe.n_experts >= 1:
        yield (
            f"model.moe.top_k={moe.top_k} must be at most model.moe.n_experts={moe.n_experts}; "
            f"try {moe.n_experts}, or more experts"
        )
    if moe.n_dense_layers > n_layers >= 1:
        yield f"model.moe.n_dense_layers={moe.n_dense_layers} must be at most model.n_layers={n_layers}; try {n_layers}"


def _check_expert_widths(config: RunConfig) -> Iterator[str]:
    """Rows of the experts' matrices are whole units of 16 bytes: torch's grouped_mm takes no others."""
    model, moe, unit = config.model, config.model.moe, _width_unit(config)
    if moe is None:
        return
    for key, width, step in (
        ("model.d_model", model.d_model, _d_model_step(config)),
        ("model.moe.d_ff", moe.d_ff, unit),
    ):
        if width >= 1 and width % unit:
            yield (
                f"{key}={width} must be a multiple of {unit} where model.moe.n_experts={moe.n_experts} and "
                f"train.precision={config.train.precision} (grouped matrix products need rows of 16 bytes); "
                f"try {_nearest_multiple(width, step)}"
            )


def _width_unit(config: RunConfig) -> int:
    """Elements in 16 bytes, at the run's precision."""
    return 4 if config.train.precision == "fp32" else 8


def _d_model_step(config: RunConfig) -> int:
    """Each multiple of it is a legal d_model."""
    model = config.model
    heads = 2 * max(1, model.n_heads)
    return heads if model.moe is None else math.lcm(heads, _width_unit(config))


def _nearest_multiple(value: int, step: int) -> int:
    return max(1, round(value / step)) * step


def _check_schedule(config: RunConfig) -> Iterator[str]:
    """The schedule's phases fit into the run."""
    schedule, steps = config.schedule, config.train.steps
    if steps < 1 or schedule.warmup_steps < 0:
        return
    if schedule.warmup_steps > steps:
        yield f"schedule.warmup_steps={schedule.warmup_steps} must be at most train.steps={steps}; try {steps // 10}"
    elif isinstance(schedule, WSDSchedule) and schedule.warmup_steps + schedule.decay_steps > steps:
        yield (
            f"schedule.decay_steps={schedule.decay_steps} + schedule.warmup_steps={schedule.warmup_steps} must be at "
            f"most train.steps={steps}; try schedule.decay_steps={steps - schedule.warmup_steps}"
        )


def _check_precision(config: RunConfig) -> Iterator[str]:
    """ZeRO 0 goes through DeepSpeed in fp32 only."""
    if config.parallel.zero == 0 and config.train.precision != "fp32":
        yield (
            f"parallel.zero=0 works with train.precision=fp32 only, not train.precision={config.train.precision}; "
            "try parallel.zero=1"
        )


def _check_evaluation(config: RunConfig) -> Iterator[str]:
    """Held-out evaluation has data to read."""
    data, every = config.data, config.train.eval_every_steps
    if every is None or data.heldout_path is not None:
        return
    told = f"train.eval_every_steps={every} needs held-out data"
    if data.heldout_fraction == 0:
        yield (
            f"{told}, but data.heldout_fraction={data.heldout_fraction} and data.heldout_path=null; "
            "try data.heldout_fraction=0.01, or train.eval_every_steps=null"
        )
    elif data.sources and all(_is_token_prefix(source.path) for source in data.sources):
        yield (
            f"{told}, but all of data.sources are token files, which have no held-out split, and "
            "data.heldout_path=null; set data.heldout_path to a prefix of token files, or train.eval_every_steps=null"
        )


def _check_retention(config: RunConfig) -> Iterator[str]:
    """Checkpoints that are to stay for their step or their held-out loss are written, and have one."""
    checkpoint, evaluated = config.checkpoint, config.train.eval_every_steps
    every, kept = checkpoint.every_steps, checkpoint.keep_every_steps
    if kept is not None and (every is None or (min(every, kept) >= 1 and kept % every)):
        tries = 10 * every if every is not None and kept < every else _nearest_multiple(kept, every or 1)
        remedy = f"try {tries}" if every is not None else f"try checkpoint.every_steps={max(1, kept // 10)}"
        yield (
            f"checkpoint.keep_every_steps={kept} must be a multiple of checkpoint.every_steps={show(every)}, "
            f"since no other step is saved; {remedy}"
        )
    if checkpoint.keep_best < 1:
        return
    told = f"checkpoint.keep_best={checkpoint.keep_best} needs"
    if evaluated is None:
        yield f"{told} held-out losses, but train.eval_every_steps=null; try train.eval_every_steps={every or 100}"
    elif every is not None and min(every, evaluated) >= 1 and every % evaluated:
        yield (
            f"{told} a held-out loss at each checkpoint: checkpoint.every_steps={every} must be a multiple of "
            f"train.eval_every_steps={evaluated}; try checkpoint.every_steps={_nearest_multiple(every, evaluated)}"
        )


def _is_token_prefix(path: str) -> bool:
    """Whether ``path`` is the prefix of existing token files."""
    return os.path.isfile(f"{path}.bin") and os.path.isfile(f"{path}.idx")
