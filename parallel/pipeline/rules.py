"""Rules for a pipeline's configuration. A broken one gives a message: key, value, rule and remedy. Imports no torch."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import assert_never

from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB, PipelineConfig, chunks, splits_backward
from parallel.torch_version import in_words, is_at_least

SPLITS_RIGHTLY = (2, 13)  # the first torch in which the parts of a backward pass add up to the whole; not so in 2.11


def pipeline_problems(
    pipeline: PipelineConfig,
    *,
    pp: int,
    n_layers: int,
    zero: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp: int,
) -> list[str]:
    """One message for each broken rule; empty with pp=1, where the schedule is not used."""
    if pp == 1:
        return []
    problems = []
    if isinstance(pipeline, Interleaved) and pipeline.n_chunks < 2:
        problems.append(
            f"parallel.pipeline.n_chunks={pipeline.n_chunks} must be at least 2 with "
            "parallel.pipeline.name=interleaved; try 2, or parallel.pipeline.name=1f1b"
        )
        return problems
    problems += layer_problems(pipeline, pp, n_layers)
    if splits_backward(pipeline) and zero == 3:
        problems.append(
            f"parallel.zero=3 must be at most 2 with parallel.pipeline.name={pipeline.name}, whose backward pass needs "
            "the weights twice; try parallel.zero=2, or parallel.pipeline.name=interleaved"
        )
    if splits_backward(pipeline) and not is_at_least(installed := version("torch"), SPLITS_RIGHTLY):
        problems.append(
            f"parallel.pipeline.name={pipeline.name} must be 1f1b or interleaved with torch {installed}, which cannot "
            "take custom functions' backward passes apart, and adds gradients up that do not belong together; "
            f"try parallel.pipeline.name=interleaved, or torch {in_words(SPLITS_RIGHTLY)}"
        )
    if global_batch_size % (dp * micro_batch_size) == 0:  # else another rule reports that
        problems += micro_batch_problems(pipeline, pp, global_batch_size, micro_batch_size, dp)
    return problems


def layer_problems(pipeline: PipelineConfig, pp: int, n_layers: int) -> list[str]:
    """Messages for broken rules on the number of layers of the stages."""
    n_stages = pp * chunks(pipeline)
    stages = f"parallel.pp={pp} with parallel.pipeline.name={pipeline.name} makes {n_stages} stages"
    if pipeline.layers is None:
        if n_stages <= n_layers:
            return []
        legal = max(
            (degree for degree in range(1, min(pp, n_layers + 1)) if degree * chunks(pipeline) <= n_layers), default=1
        )
        rule = f"which model.n_layers={n_layers} must cover with at least one layer each"
        return [f"{stages}, {rule}; try parallel.pp={legal}"]
    text = f"parallel.pipeline.layers={list(pipeline.layers)}"
    if len(pipeline.layers) != n_stages:
        return [f"{text} must name one number for each stage, and {stages}; try parallel.pipeline.layers=null"]
    if min(pipeline.layers) < 1:
        return [f"{text} must give every stage at least one layer; try parallel.pipeline.layers=null"]
    if sum(pipeline.layers) != n_layers:
        rule = f"must add up to model.n_layers={n_layers}, not {sum(pipeline.layers)}"
        return [f"{text} {rule}; try parallel.pipeline.layers=null"]
    return []


def micro_batch_problems(
    pipeline: PipelineConfig, pp: int, global_batch_size: int, micro_batch_size: int, dp: int
) -> list[str]:
    """Messages for broken rules on the number of micro-batches in one step."""
    count = global_batch_size // (dp * micro_batch_size)
    rule = broken_rule(pipeline, pp, count)
    if rule is None:
        return []
    given = (
        f"train.global_batch_size={global_batch_size} over dp={dp} and train.micro_batch_size={micro_batch_size} gives "
        f"{count} micro-batches"
    )
    reach = min(pp, 4096)
    legal = nearest(
        count, [n for n in range(max(1, count - 4 * reach), count + 4 * reach) if runs_micro_batches(pipeline, pp, n)]
    )
    remedy = f"try train.global_batch_size={' or '.join(str(n * dp * micro_batch_size) for n in legal)}"
    return [f"{given}; parallel.pipeline.name={pipeline.name} must {rule}; {remedy}"]


def runs_micro_batches(pipeline: PipelineConfig, pp: int, n_micro_batches: int) -> bool:
    """Whether the schedule can run this number of micro-batches."""
    return n_micro_batches >= 1 and broken_rule(pipeline, pp, n_micro_batches) is None


def broken_rule(pipeline: PipelineConfig, pp: int, n_micro_batches: int) -> str | None:
    """The rule, in words, that this number of micro-batches (at least 1) breaks under the schedule; None if it fits."""
    match pipeline:
        case OneFOneB():
            return f"have at least parallel.pp={pp} of them" if n_micro_batches < pp else None
        case Interleaved():
            rounds = max(1, n_micro_batches // pp)
            words = f"divide them into {n_micro_batches} // parallel.pp={pp} = {rounds} rounds of one size"
            return words if n_micro_batches % rounds else None
        case ZBV():
            return None
        case DualPipeV():
            return f"have at least 2 x parallel.pp={pp} of them" if n_micro_batches < 2 * pp else None
        case _:
            assert_never(pipeline)


def nearest(value: int, legal: Sequence[int]) -> list[int]:
    """The nearest of the ascending numbers ``legal`` below and above ``value``: two, one or none."""
    below, above = [n for n in legal if n < value], [n for n in legal if n > value]
    return [*below[-1:], *above[:1]]
