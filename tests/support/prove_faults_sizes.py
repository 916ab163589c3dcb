"""Faults that show only above a size: beyond one tile, chunk or bucket. Planted by prove_faults.plant."""

from collections.abc import Callable
from typing import Any

import torch


def drop_tiles(first: int) -> None:
    """Ring attention computes only the first ``first`` tiles of each block of keys."""
    import parallel.context_parallel.ring as ring

    plan = ring.plan_ring
    ring.plan_ring = lambda *arguments: [tiles[:first] for tiles in plan(*arguments)]


def shift_pieces() -> None:
    """Where ring attention works on pieces of documents, documents within a row begin one token late."""
    import parallel.context_parallel.pieces as pieces

    documents_of = pieces.documents_of
    pieces.documents_of = lambda bounds, seq_len, *rest: documents_of(
        sorted({bound + (bound % seq_len > 0) for bound in bounds}), seq_len, *rest
    )


def forget_earlier_pieces() -> None:
    """Each piece of a document's queries sees only the keys at its own positions, none of earlier pieces."""
    import modeling.context as context

    cut = context.cut_documents
    context.cut_documents = lambda *arguments: [piece._replace(keys=piece.queries) for piece in cut(*arguments)]


def lose_second_chunk(module: Any, function: Any) -> None:
    """The gradient of the loss's second chunk of tokens becomes zero. ``module`` has the function that computes it."""
    seen = [0]
    forward, make = function.forward, module.losses_and_gradient

    def counting(*arguments: Any) -> Any:
        seen[0] = 0
        return forward(*arguments)

    def losing(*arguments: Any) -> Any:
        seen[0] += 1
        made = make(*arguments)
        if seen[0] == 2 and made[-1] is not None:
            made[-1].zero_()
        return made

    function.forward = staticmethod(counting)
    module.losses_and_gradient = losing


def lose_second_chunk_of_one_device() -> None:
    import modeling.loss as loss

    lose_second_chunk(loss, loss.ChunkedCrossEntropy)


def lose_second_chunk_under_tp() -> None:
    import modeling.loss as loss
    import parallel.tensor as tensor

    lose_second_chunk(tensor, loss.ChunkedCrossEntropy)


def pad_rows_short() -> None:
    """The last unit of rows of the last expert is left out, where an expert has more than one unit."""
    import modeling.kernels.experts as experts

    place = experts.rows_in_order

    def misplaced(order_P: torch.Tensor, top_k: int, counts_E: torch.Tensor, row_multiple: int) -> Any:
        rows = place(order_P, top_k, counts_E, row_multiple)
        if row_multiple == 1 or int(counts_E.max()) <= row_multiple:
            return rows
        is_last_E = rows.ends_E == len(rows.tokens_R)
        return rows._replace(ends_E=rows.ends_E - is_last_E.to(torch.int32) * row_multiple)

    experts.rows_in_order = misplaced


def skip_second_bucket(optimizer: Any, method: str, as_it_is: Callable[[Any, Any], Any]) -> None:
    """Of a step's buckets of gradients, only the first is reduced; the others stay as this rank has them.

    ``method`` of ``optimizer`` reduces a bucket; ``as_it_is`` replaces it.
    """
    from parallel.zero.engine import Engine

    seen = [0]
    reduce, step = getattr(optimizer, method), Engine.step

    def skipping(self: Any, tensor: Any, *rest: Any, **options: Any) -> Any:
        seen[0] += 1
        return reduce(self, tensor, *rest, **options) if seen[0] == 1 else as_it_is(self, tensor)

    def starting_again(self: Any, lr: float) -> Any:
        seen[0] = 0
        return step(self, lr)

    setattr(optimizer, method, skipping)
    Engine.step = starting_again


def skip_second_zero_bucket() -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    skip_second_bucket(DeepSpeedZeroOptimizer, "average_tensor", lambda _, tensor: tensor)


def skip_second_bf16_bucket() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    skip_second_bucket(DeepSpeedEngine, "allreduce_bucket", lambda engine, bucket: engine.flatten(bucket))


def shift_gathered(engine: Any) -> None:
    """Under ZeRO 3 a gathered weight is shifted by one element."""

    def shift(module: Any, _: Any) -> None:
        for weight in module.parameters(recurse=False):
            if not weight.ds_persist:
                weight.data.copy_(weight.data.flatten().roll(1).view_as(weight.data))

    for module in engine.model.modules():
        module.register_forward_pre_hook(shift)


def forget_update_group(engine: Any) -> None:
    """ZeRO 3 updates the first group of weights alone."""
    update = engine.sharding.optimizer._optimizer_step

    def first_only(group: int) -> None:
        if group == 0:
            update(group)

    engine.sharding.optimizer._optimizer_step = first_only
