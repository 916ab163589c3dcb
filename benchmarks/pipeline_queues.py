"""What a pipeline's steps take by the queues that NCCL carries its transfers out in: a model, computed, on any machine.

A group's transfers are one queue on each rank, which keeps the order in which they were begun. A transfer begins, on
either side, when the one before it in that queue has ended and the rank's passes that were begun before it have, and
ends when both sides have begun. Orders are torch's own. A forward pass takes one unit divided by the stages of a rank,
a whole backward pass two, transfers none.

    python benchmarks/pipeline_queues.py --pp 4 --micro-batches 16

prints a JSON line for each schedule: the time of a step with one queue for all stages, and with one for each neighbour,
to that of transfers that wait for nothing else.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, PipelineConfig, chunks, stage_ranks
from parallel.pipeline.schedule import _placeholders, build_schedule

UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
BESIDE = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}  # the stage at the other end


class Op(NamedTuple):
    """A pass or a transfer, as one rank begins it."""

    kind: str
    stage: int
    micro_batch: int

    @property
    def other_end(self) -> "Op":
        """Of a transfer, what the other rank begins."""
        kind = self.kind.replace("SEND", "?").replace("RECV", "SEND").replace("?", "RECV")
        return Op(kind, self.stage + BESIDE[self.kind], self.micro_batch)


def orders(config: PipelineConfig, pp: int, n_micro_batches: int) -> list[list[Op]]:
    """What each rank begins, in torch's order."""
    schedule = build_schedule(config, _placeholders(config, pp), n_micro_batches, None)
    found = [
        [part for action in schedule.pipeline_order_with_comms[rank] for part in action.sub_actions or (action,)]
        for rank in range(pp)
    ]
    ops = [
        [Op(part.computation_type.value, part.stage_index, part.microbatch_index) for part in each] for each in found
    ]
    return [[op for op in each if op.kind in UNITS or op.kind in BESIDE] for each in ops]


def step_time(of_ranks: Sequence[Sequence[Op]], ranks: Sequence[int], queue_of: Callable[[int, Op], Any]) -> float:
    """When the last pass ends. ``queue_of``: a rank's queue for a transfer; None: it waits for nothing but its data."""
    per_rank, ends, before_pass, before_in_queue = len(ranks) // len(of_ranks), {}, {}, {}
    for rank, ops in enumerate(of_ranks):
        last: Op | None = None
        queues: dict[Any, Op] = {}
        for op in ops:
            before_pass[op] = last
            if op.kind in UNITS:
                last = op
                continue
            queue = queue_of(rank, op)
            before_in_queue[op] = None if queue is None else queues.get(queue)
            if queue is None and op.kind.startswith("RECV"):
                before_pass[op] = None
            queues[queue] = op

    def end(op: Op | None) -> float:
        if op is None:
            return 0.0
        if op not in ends:
            ends[op] = after_pass(op) if op.kind in UNITS else max(begin(op), begin(op.other_end))
        return ends[op]

    def begin(op: Op) -> float:
        return max(end(before_pass[op]), end(before_in_queue[op]))

    def after_pass(op: Op) -> float:
        brings = Op("RECV_F" if op.kind == "F" else "RECV_B", op.stage, op.micro_batch)
        waits = end(brings) if brings in before_pass and op.kind != "W" else 0.0
        return max(end(before_pass[op]), waits) + UNITS[op.kind] / per_rank

    return max(end(op) for ops in of_ranks for op in ops)


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=16)
    asked = parser.parse_args()
    sys.setrecursionlimit(10**6)
    for config in (Interleaved(), ZBV(), DualPipeV()):
        ranks = stage_ranks(config, asked.pp)
        of_ranks = orders(config, asked.pp, asked.micro_batches)
        alone = step_time(of_ranks, ranks, lambda rank, op: None)
        one = step_time(of_ranks, ranks, lambda rank, op: "all")
        two = step_time(of_ranks, ranks, lambda rank, op, ranks=ranks: ranks[op.other_end.stage])
        sizes = {
            "schedule": config.name,
            "pp": asked.pp,
            "micro_batches": asked.micro_batches,
            "stages": chunks(config),
        }
        print(json.dumps(sizes | {"one_queue": round(one / alone, 3), "by_neighbour": round(two / alone, 3)}))


if __name__ == "__main__":
    main()
