"""Records in a proof's ranks how often each size is exceeded: chunks of a loss, tiles, buckets, gathers and others.

Tests check with it that a proof computes below as well as above each size.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prove_faults_patches import change_engines


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """A context in which every rank appends a line "size count" to ``path`` for each new count.

    The recording stays on after the context ends.
    """
    if "RANK" in os.environ:
        record(Recorder(path))
    yield


def read_record(path: Path) -> dict[str, set[int]]:
    """Size -> the counts recorded on all ranks."""
    seen: dict[str, set[int]] = {}
    for line in path.read_text().splitlines():
        size, count = line.split()
        seen.setdefault(size, set()).add(int(count))
    return seen


class Recorder:
    """Writes each new pair of size and count as a line; counts calls of functions in between."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: set[tuple[str, int]] = set()
        self.calls: dict[str, int] = {}

    def __call__(self, size: str, count: int) -> None:
        if (size, count) not in self.written:
            self.written.add((size, count))
            with open(self.path, "a") as file:
                file.write(f"{size} {count}\n")

    def count_calls(self, owner: Any, name: str, size: str) -> None:
        """Makes calls of ``owner.name`` be counted for ``size``."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[size] = self.calls.get(size, 0) + 1
            return function(*arguments, **options)

        setattr(owner, name, counted)

    def around(self, function: Callable[..., Any], *sizes: str) -> Callable[..., Any]:
        """``function``, wrapped to record how many calls were counted for each size while it ran."""

        def measured(*arguments: Any, **options: Any) -> Any:
            self.calls |= dict.fromkeys(sizes, 0)
            result = function(*arguments, **options)
            for size in sizes:
                self(size, self.calls[size])
            return result

        return measured


def record(seen: Recorder) -> None:
    """Patches this process to record chunks of a loss, tiles, pieces, units of rows, parts of a copy, and buckets."""
    import launcher.training.loop as loop
    import modeling.context as context
    import modeling.kernels.experts as experts
    import modeling.loss as loss
    import parallel.checkpoint.saver as saver
    import parallel.context_parallel.ring as ring
    import parallel.tensor as tensor

    seen.count_calls(loss, "losses_and_gradient", "chunk_logits")
    seen.count_calls(tensor, "losses_and_gradient", "chunk_logits_under_tp")
    chunked = loss.ChunkedCrossEntropy
    chunked.forward = staticmethod(seen.around(chunked.forward, "chunk_logits", "chunk_logits_under_tp"))

    plan = ring.plan_ring

    def planned(*arguments: Any) -> Any:
        blocks = plan(*arguments)
        seen("ring_tile", max(map(len, blocks)))
        return blocks

    ring.plan_ring = planned
    seen.count_calls(ring, "attend_pieces", "ring_pieces_every")
    ring.ring_forward = seen.around(ring.ring_forward, "ring_pieces_every")  # counted for each layer's call
    cut = context.cut_documents

    def counted_pieces(documents_BS: Any, *arguments: Any) -> Any:
        pieces = cut(documents_BS, *arguments)
        documents = {(piece.rows.start, piece.queries.start) for piece in pieces if piece.keys == piece.queries}
        seen("query_block", 1 if len(pieces) == len(documents) else 2)
        return pieces

    context.cut_documents = counted_pieces
    place = experts.rows_in_order

    def placed(order_P: Any, top_k: int, counts_E: Any, row_multiple: int) -> Any:
        if row_multiple > 1:  # 1: rows to be sent over ep, which are not rounded up
            seen("row_multiple", -(-int(counts_E.max()) // row_multiple))
        return place(order_P, top_k, counts_E, row_multiple)

    experts.rows_in_order = placed
    stage = saver.staged

    def staged(*arguments: Any) -> Any:
        parts = 0
        for chunk in stage(*arguments):
            parts += 1
            yield chunk
        seen("staging_bytes", parts)

    saver.staged = staged
    record_deepspeed(seen)
    loop.accumulate_gradients = seen.around(
        loop.accumulate_gradients, "bucket", "reduced", "prefetched", "reused", "live"
    )


def record_deepspeed(seen: Recorder) -> None:
    """Patches this process to record DeepSpeed's buckets and gathers in a step.

    Also recorded for each engine are the weights that do not stay whole, and the update groups that are split. The size
    ``reused`` determines how often one weight is gathered in a step; ``prefetched`` and ``live``, in how many calls.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from parallel.zero.scattered import Zero1Scattered

    seen.count_calls(Zero1Scattered, "reduce", "reduced")
    seen.count_calls(DeepSpeedZeroOptimizer, "average_tensor", "bucket")
    seen.count_calls(DeepSpeedEngine, "allreduce_bucket", "bucket")
    gather = PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params
    gathered: dict[int, int] = {}

    def gathering(self: Any, weights: Any, *rest: Any, **options: Any) -> Any:
        if not seen.calls.get("reused"):
            gathered.clear()
        for weight in weights:
            gathered[weight.ds_id] = gathered.get(weight.ds_id, 0) + 1
        seen.calls["prefetched"] = seen.calls["live"] = seen.calls.get("live", 0) + 1
        seen.calls["reused"] = max(gathered.values(), default=0)
        return gather(self, weights, *rest, **options)

    PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params = gathering

    def look(engine: Any) -> None:
        if engine.zero == 3:
            seen("persistent", sum(not weight.ds_persist for weight in engine.model.parameters()))
            seen("updated", len(engine.sharding.optimizer.fp16_groups) - len(engine.base.param_groups))

    change_engines(look)
