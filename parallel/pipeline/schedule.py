"""Pipeline schedules: torch's schedule objects, and the order of each rank's passes as plain values."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, assert_never, get_args

from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB, PipelineConfig, stage_ranks

Kind = Literal["F", "B", "I", "W"]  # forward; backward: whole, of inputs, of weights
KINDS: tuple[Kind, ...] = get_args(Kind)


class Action(NamedTuple):
    """One pass of one micro-batch through one stage: forward ("F"), backward ("B"), or a part of that ("I", "W")."""

    kind: Kind
    stage: int
    micro_batch: int


def build_schedule(
    config: PipelineConfig, stages: Sequence[Any], n_micro_batches: int, loss_fn: Callable[[Tensor, Any], Tensor] | None
) -> Any:
    """The torch schedule over this rank's ``stages`` (torch.distributed.pipelining.PipelineStage).

    It does not scale gradients by the number of micro-batches.
    """
    match config:
        case OneFOneB():
            return Schedule1F1B(stages[0], n_micro_batches, loss_fn, scale_grads=False)
        case Interleaved():
            return ScheduleInterleaved1F1B(list(stages), n_micro_batches, loss_fn, scale_grads=False)
        case ZBV():
            return ScheduleZBVZeroBubble(list(stages), n_micro_batches, loss_fn, scale_grads=False)
        case DualPipeV():
            return ScheduleDualPipeV(list(stages), n_micro_batches, loss_fn, scale_grads=False)
        case _:
            assert_never(config)


def action_orders(config: PipelineConfig, pp: int, n_micro_batches: int) -> list[list[Action]]:
    """Each pp rank's actions in the order in which the schedule runs them, found without starting any process."""
    return [[action for slot in slots for action in slot] for slots in action_slots(config, pp, n_micro_batches)]


def action_slots(config: PipelineConfig, pp: int, n_micro_batches: int) -> list[list[tuple[Action, ...]]]:
    """Each pp rank's actions, in the groups in which torch runs them: single ones, or pairs that share one transfer.

    The results of both actions of a pair are sent after the second.
    """
    if isinstance(config, OneFOneB):
        return [[(action,) for action in _one_f_one_b(pp, rank, n_micro_batches)] for rank in range(pp)]
    order = build_schedule(config, _placeholders(config, pp), n_micro_batches, None).pipeline_order
    slots = [[_actions_of(action) for action in order[rank] if action is not None] for rank in range(pp)]
    return [[passes for passes in each if passes] for each in slots]


def _one_f_one_b(pp: int, rank: int, n_micro_batches: int) -> list[Action]:
    """One rank's actions under 1F1B, written out: torch 2.13's own order lacks the last rank's first micro-batch."""
    warmup = min(n_micro_batches, pp - rank)
    actions = [Action("F", rank, number) for number in range(warmup)]
    for number in range(n_micro_batches):
        actions.append(Action("B", rank, number))
        if number + warmup < n_micro_batches:
            actions.append(Action("F", rank, number + warmup))
    return actions


def _placeholders(config: PipelineConfig, pp: int) -> list[Any]:
    """Stand-ins for rank 0's stages, with the attributes that torch's schedules read when they plan."""
    ranks = stage_ranks(config, pp)
    mine = [stage for stage, rank in enumerate(ranks) if rank == 0]
    common = {"num_stages": len(ranks), "group_size": pp, "group_rank": 0, "submod": None}
    return [SimpleNamespace(stage_index=stage, is_last=stage == len(ranks) - 1, **common) for stage in mine]


def _actions_of(slot: Any) -> tuple[Action, ...]:
    """The passes of one slot of torch's order; empty for other actions, such as REDUCE_GRAD at the end."""
    found = [(part.computation_type.value, part) for part in slot.sub_actions or (slot,)]
    return tuple(Action(kind, part.stage_index, part.microbatch_index) for kind, part in found if kind in KINDS)
