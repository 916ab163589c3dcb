"""The rules between a config's values, all in one place: every problem at once, before anything is created."""

import math
import os
import sys
from collections.abc import Iterator

from data.places import why_no_path
from launcher.config.batch_rules import check_batch
from launcher.config.budget_rules import check_budget, check_one_way
from launcher.config.families import check_family
from launcher.config.fp8_rules import check_fp8_widths
from launcher.config.layout_rules import check_layout
from launcher.config.ranges import is_beyond, range_problems
from launcher.config.tree import RunConfig
from launcher.config.words import join_or, show
from launcher.slurm.rules import check_slurm
from modeling.config import ModelConfig
from modeling.counts import count_parameters
from modeling.precision_config import Precision
from modeling.rope_scaling import DynamicScaling, LongRopeScaling
from modeling.schedules import WSDSchedule

MAX_PARAMETERS = 10**14
MAX_TOKENS = 2**63 - 1  # of a run: positions in the data are 64-bit integers


def check(config: RunConfig, world_size: int, *, is_small: bool = False) -> list[str]:
    """Every rule that ``config`` breaks on ``world_size`` processes, one line each; empty where it can run.

    A line names each key involved with its value, the rule, and a remedy. Rules of the data itself (its paths) are
    checked by ``data.rules.check_data``. ``is_small``: the config is of a proof's small model, computed in bf16 where
    the run takes fp8.
    """
    lines = [*range_problems(config), *_check_names(config)]
    if is_beyond(config):
        return lines
    broken = {line.partition("=")[0].partition("[")[0] for line in lines}
    relations = [
        *([] if lines else _check_size(config)),
        *check_batch(config, world_size),
        *_check_attention(config),
        *config.model.problems(),
        *_check_positions(config),
        *_check_depth(config),
        *_check_expert_widths(config, "bf16" if is_small else config.train.precision),
        *_check_schedule(config),
        *_check_precision(config),
        *_check_iterations(config),
        *_check_grad_reduce(config),
        *check_one_way(config.train),
        *([] if is_small or lines else check_fp8_widths(config)),
        *_check_evaluation(config),
        *_check_tasks(config),
        *_check_retention(config),
        *check_family(config.model),
        *check_layout(config, world_size),
        *check_slurm(config.slurm),
    ]
    if not lines and not relations:
        relations += check_budget(config, world_size)
    return lines + [line for line in relations if line.partition("=")[0] not in broken]


def _check_size(config: RunConfig) -> Iterator[str]:
    """The model has at most MAX_PARAMETERS, and the run takes at most MAX_TOKENS."""
    model, train = config.model, config.train
    n_parameters = count_parameters(model).total if _more_than_all(model) > MAX_PARAMETERS else 0
    if n_parameters > MAX_PARAMETERS:
        step = _d_model_step(config)
        fitting = max(step, model.d_model * MAX_PARAMETERS // n_parameters // step * step)
        yield (
            f"model.d_model={model.d_model} with model.n_layers={model.n_layers} and the other widths makes "
            f"{n_parameters:.3g} parameters, and must make at most {MAX_PARAMETERS:.0e}; try {fitting}"
        )
    tokens = train.steps * train.global_batch_size * config.data.seq_len
    if tokens > MAX_TOKENS:
        yield (
            f"train.steps={train.steps} x train.global_batch_size={train.global_batch_size} x "
            f"data.seq_len={config.data.seq_len} = {tokens:.3g} tokens must be at most {MAX_TOKENS:.3g}; "
            f"try train.steps={MAX_TOKENS // (train.global_batch_size * config.data.seq_len)}"
        )


def _more_than_all(model: ModelConfig) -> int:
    """An upper bound on the number of parameters, without torch; only a config above the limit needs the exact count.

    A layer has less than sixteen matrices, or stacks of one for each expert, with no side longer than ``widest``.
    """
    experts = model.moe.n_experts if model.moe else 1
    return 2 * model.vocab_size * model.d_model + 16 * len(model.all_layers) * experts * model.widest**2


def _check_names(config: RunConfig) -> Iterator[str]:
    """The run's name is that of one folder, and its paths can be used on this machine."""
    name = config.name
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        letters = "".join(letter if letter.isprintable() and letter not in "/\\" else "-" for letter in name).strip(
            ".-"
        )
        yield f"name={show(name)} must be one folder's name, without path separators; try {show(letters or 'run')}"
    elif (reason := why_no_path(name)) is not None:
        encoding = sys.getfilesystemencoding()
        known = name[:40].encode(encoding, "replace").decode(encoding).replace("?", "-").strip(".-")
        yield f"name={show(name)} {reason}; try {show(known or 'run')}"
    for key, path, usual in (
        ("run_dir", config.run_dir, "null (runs/NAME)"),
        ("checkpoint.dir", config.checkpoint.dir, "null (RUN_DIR/checkpoints)"),
        ("init_from", config.init_from, "null (weights drawn from seed)"),
    ):
        if path is not None:
            reason = why_no_path(path, created=True) if path and path.isprintable() else "must be a path"
            if reason is None and key == "run_dir" and "://" in path:
                reason = "must be a path on this machine, and is a URL (checkpoint.dir may be one)"
            if reason is None and key == "checkpoint.dir" and "://" in path and "::" in path:
                reason = "must be the URL of one place, and :: chains several, which cannot be written to in parts"
                usual = f"{show(path.rpartition('::')[2])}"
            if reason is not None:
                yield f"{key}={show(path)} {reason}; try {usual}"


def _check_attention(config: RunConfig) -> Iterator[str]:
    """Heads divide evenly, and with rotary embedding each head has an even number of channels."""
    model = config.model
    d_model, n_heads, n_kv_heads, d_head = model.d_model, model.n_heads, model.n_kv_heads, model.d_head
    if min(d_model, n_heads, n_kv_heads, 1 if d_head is None else d_head) < 1:
        return
    if n_heads % n_kv_heads:
        tries = join_or(list(map(str, _divisors_near(n_heads, n_kv_heads))))
        yield f"model.n_kv_heads={n_kv_heads} must divide model.n_heads={n_heads}; try {tries}"
    if model.mla is not None:
        return  # its own keys say how wide its heads are
    turns = model.positions == "rope"
    if d_head is not None and d_head % 2 and turns:
        yield f"model.d_head={d_head} must be even (rotary embedding turns channels in pairs); try {d_head + 1}"
    if turns and model.rope_fraction < 1 and (d_head is not None or d_model % n_heads == 0):
        yield from _check_turning_part(model)
    if d_head is None and d_model % (2 * n_heads if turns else n_heads):
        heads = f"2 x model.n_heads={n_heads} = {2 * n_heads}" if turns else f"model.n_heads={n_heads}"
        reason = "rotary embedding turns channels in pairs" if turns else "all heads have as many channels"
        yield (
            f"model.d_model={d_model} must be a multiple of {heads} where model.d_head=null ({reason}); "
            f"try {_nearest_multiple(d_model, _d_model_step(config))}, or set model.d_head"
        )


def _check_turning_part(model: ModelConfig) -> Iterator[str]:
    """The rotated fraction of a head's channels is an even number, since channels are rotated in pairs."""
    turning = model.rope_dim
    if turning < 2 or turning % 2:
        fitting = max(2, 2 * (turning // 2)) / model.head_dim
        yield (
            f"model.rope_fraction={model.rope_fraction} of a head's {model.head_dim} channels is {turning}, and must "
            f"be an even number, at least 2 (rotary embedding turns channels in pairs); try {fitting}"
        )


def _check_positions(config: RunConfig) -> Iterator[str]:
    """Every position of a sequence has a row in the table of learned ones; trained frequencies are the original ones.

    Dynamic scaling's frequencies, and which of LongRoPE's factors count, depend on the longest sequence of a forward
    pass. Beyond the original length, training would depend on which sequences the layout puts into one pass.
    """
    rows, seq_len = config.model.max_positions, config.data.seq_len
    if rows is not None and 1 <= rows < seq_len:
        yield (
            f"data.seq_len={seq_len} must be at most model.max_positions={rows} (a position beyond has no row in the "
            f"table); try {rows}"
        )
    scaling = config.model.rope_scaling
    if isinstance(scaling, DynamicScaling | LongRopeScaling) and 1 <= scaling.original_seq_len < seq_len:
        yield (
            f"data.seq_len={seq_len} must be at most model.rope_scaling.original_seq_len={scaling.original_seq_len} "
            f"where model.rope_scaling.name={scaling.name} (it is for generating beyond the length of training); "
            f"try {scaling.original_seq_len}"
        )


def _divisors_near(number: int, value: int) -> list[int]:
    """The divisors of ``number`` next to ``value``, on either side."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    below = [n for n in divisors if n < value][-1:]
    return below + [n for n in divisors if n > value][:1]


def _check_depth(config: RunConfig) -> Iterator[str]:
    """A sequence has more tokens than multi-token prediction looks ahead."""
    mtp, seq_len = config.model.mtp, config.data.seq_len
    if mtp is not None and seq_len <= mtp.depth:
        yield (
            f"data.seq_len={seq_len} must be above model.mtp.depth={mtp.depth} (no sample has a token so far ahead); "
            f"try {mtp.depth + 1}"
        )


def _check_expert_widths(config: RunConfig, precision: Precision) -> Iterator[str]:
    """Rows of the experts' matrices are multiples of 16 bytes, as torch's grouped_mm needs them."""
    for key, width in uneven_expert_widths(config.model, precision):
        unit = _width_unit(precision)
        step = _d_model_step(config) if key == "model.d_model" else unit
        yield (
            f"{key}={width} must be a multiple of {unit} where {_n_experts(config.model)} and "
            f"train.precision={precision} (grouped matrix products need rows of 16 bytes); "
            f"try {_nearest_multiple(width, step)}"
        )


def check_export_widths(model: ModelConfig, dtype: Precision) -> list[str]:
    """One line for each width with which the experts of an export in ``dtype`` could not be computed."""
    return [
        f"--dtype={dtype} needs {key}={width} to be a multiple of {_width_unit(dtype)} where {_n_experts(model)} "
        "(grouped matrix products in transformers need rows of 16 bytes); try --dtype fp32"
        for key, width in uneven_expert_widths(model, dtype)
    ]


def uneven_expert_widths(model: ModelConfig, precision: Precision) -> Iterator[tuple[str, int]]:
    """(key, value) of each width of the experts' matrices whose rows are no multiple of 16 bytes in ``precision``."""
    if model.moe is not None:
        for key, width in (("model.d_model", model.d_model), ("model.moe.d_ff", model.moe.d_ff)):
            if width >= 1 and width % _width_unit(precision):
                yield key, width


def _n_experts(model: ModelConfig) -> str:
    assert model.moe is not None
    return f"model.moe.n_experts={model.moe.n_experts}"


def _width_unit(precision: Precision) -> int:
    """How many elements of the precision fill 16 bytes."""
    return {"fp32": 4, "bf16": 8, "fp16": 8, "fp8": 16}[precision]


def _d_model_step(config: RunConfig) -> int:
    """The step between legal values of d_model: each of its multiples is one."""
    model = config.model
    heads = 2 * max(1, model.n_heads)
    return heads if model.moe is None else math.lcm(heads, _width_unit(config.train.precision))


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
    """ZeRO 0 works in fp32 only, and 8-bit weights are kept in fp8 only."""
    if config.parallel.zero == 0 and config.train.precision != "fp32":
        yield (
            f"parallel.zero=0 works with train.precision=fp32 only, not train.precision={config.train.precision}; "
            "try parallel.zero=1"
        )
    if config.train.fp8_keep_weights and config.train.precision != "fp8":
        yield (
            "train.fp8_keep_weights=true needs train.precision=fp8, not "
            f"train.precision={config.train.precision}, whose weights are not cut; try train.fp8_keep_weights=false"
        )


def _check_iterations(config: RunConfig) -> Iterator[str]:
    """Muon iterates in no lower precision than the run's own."""
    optimizer = config.optimizer
    if optimizer.name == "muon" and optimizer.iteration_dtype == "bf16" and config.train.precision == "fp32":
        yield (
            "optimizer.iteration_dtype=bf16 needs a train.precision of 16 bits or less, not train.precision=fp32, "
            "whose updates it would round; try optimizer.iteration_dtype=fp32"
        )


def _check_grad_reduce(config: RunConfig) -> Iterator[str]:
    """Only ZeRO 1 can choose when gradients are reduced, and a reduction in bf16 rounds neither sums nor gradients."""
    parallel, precision = config.parallel, config.train.precision
    needs_zero2 = parallel.offload_optimizer  # which the rules of the layout report
    if parallel.grad_reduce != "step" and parallel.zero != 1:
        stage_1 = "" if needs_zero2 else "parallel.zero=1, or "
        yield (
            f"parallel.grad_reduce={parallel.grad_reduce} needs parallel.zero=1, not parallel.zero={parallel.zero}, "
            f"whose gradients are reduced at times of its own; try {stage_1}parallel.grad_reduce=step"
        )
    if parallel.grad_reduce_dtype == "bf16" and parallel.grad_reduce != "micro_batch":
        remedy = "parallel.grad_reduce_dtype=fp32" if needs_zero2 else "parallel.grad_reduce=micro_batch"
        yield (
            "parallel.grad_reduce_dtype=bf16 needs parallel.grad_reduce=micro_batch, not "
            f"parallel.grad_reduce={parallel.grad_reduce}, which would round sums; try {remedy}"
        )
    if parallel.grad_reduce_dtype == "bf16" and config.train.stored != "bf16":
        yield (
            f"parallel.grad_reduce_dtype=bf16 would round the gradients of train.precision={precision}; "
            "try parallel.grad_reduce_dtype=fp32"
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


def _check_tasks(config: RunConfig) -> Iterator[str]:
    """A line where evaluation on tasks is configured, but the run has no tokenizer."""
    data = config.data
    has_text = not data.sources or not all(_is_token_prefix(source.path) for source in data.sources)
    if config.train.eval_tasks and data.tokenizer is None and not has_text:
        yield (
            "train.eval_tasks need a tokenizer, but all of data.sources are token files and data.tokenizer=null; "
            "set data.tokenizer to theirs, or try train.eval_tasks=[]"
        )


def _check_retention(config: RunConfig) -> Iterator[str]:
    """Steps whose checkpoints are kept for good are saved, and checkpoints kept as the best have a held-out loss."""
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
