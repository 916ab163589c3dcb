"""Faults in the optimizer's updates and in initial weights, with right gradients. Planted by prove_faults.plant."""

import itertools
from dataclasses import replace
from typing import Any


def scale_to_clip_norm() -> None:
    """ZeRO 0: gradients below the clipping norm are scaled up to it."""
    from parallel.zero.replicated import Replicated

    step = Replicated.step

    def scaling(self: Any, norm: Any) -> bool:
        for _, gradient, _ in self.gradients():
            gradient.mul_(self.clip_norm / (norm + 1e-6))
        return step(self, norm.clamp(max=self.clip_norm / 2))

    Replicated.step = scaling


def keep_first_lr() -> None:
    """The last group of weights keeps the learning rate of the first step."""
    from parallel.zero.engine import Engine

    step = Engine.step

    def late(self: Any, lr: float) -> Any:
        first = self.__dict__.setdefault("first_lr", lr)
        groups = self.base.param_groups
        self.base.param_groups = groups[:-1]
        groups[-1]["lr"] = first
        deepspeed = self.sharding.deepspeed
        run = deepspeed.step

        def with_all_groups(*arguments: Any) -> Any:
            self.base.param_groups = groups
            return run(*arguments)

        deepspeed.step = with_all_groups
        try:
            return step(self, lr)
        finally:
            deepspeed.step = run

    Engine.step = late


def join_experts() -> None:
    """Muon treats all experts of a rank as one matrix."""
    import modeling.optimizers.orthogonal as muon

    orthogonal = muon.orthogonal
    muon.orthogonal = lambda matrices, *dtype: orthogonal(matrices.flatten(0, -2), *dtype).view_as(matrices)


def leave_parts() -> None:
    """Muon orthogonalizes only this rank's part of a matrix that tp cuts."""
    from parallel.matrices import CutMatrices

    CutMatrices.of_whole = lambda self, weight, part, function: function(part)


def join_partition() -> None:
    """Muon treats all elements of a rank's flat partition as one matrix with one row."""
    from parallel.zero.matrices import DealtMatrices

    def whole_partition(self: Any, weight: Any, read: Any, function: Any, write: Any) -> None:
        write(0, function(read(0, weight.numel()).view(1, -1)).view(-1))

    DealtMatrices.transform = whole_partition


def swap_rows_and_columns() -> None:
    """Muon swaps the numbers of rows and columns of a matrix that it has gathered."""
    import parallel.zero.matrices as dealt

    stacks_of = dealt.stacks_of
    dealt.stacks_of = lambda mine, received: [
        replace(stack, shape=(*stack.shape[:-2], stack.shape[-1], stack.shape[-2]))
        for stack in stacks_of(mine, received)
    ]


def keep_results() -> None:
    """The owner of a matrix does not send the updated elements back to the other ranks."""
    import parallel.zero.matrices as dealt

    exchange, calls = dealt.exchange_elements, itertools.count()

    def losing(flat: Any, sent: Any, received: Any, axis: Any) -> Any:
        result = exchange(flat, sent, received, axis)
        if next(calls) % 2:
            for rank, elements in enumerate(result.split(received)):
                elements.mul_(rank == axis.rank)
        return result

    dealt.exchange_elements = losing


def round_masters() -> None:
    """The fp32 masters are rounded to bf16 after each update."""
    from parallel.zero.engine import Engine

    step = Engine.step

    def rounding(self: Any, lr: float) -> Any:
        result = step(self, lr)
        for flat in {id(fragment.flat): fragment.flat for fragment in self.fragments}.values():
            flat.data.copy_(flat.data.bfloat16())
        return result

    Engine.step = rounding


def learn_by_own_widths() -> None:
    """muP: a tp rank derives the learning rate from the fan-in of its own part of a matrix."""
    import parallel.zero.engine as engine
    from parallel.layout import AXIS_OF

    widths_of = engine.widths_of
    engine.widths_of = lambda config: {
        dim: ratio / 2 if AXIS_OF[dim] == "tp" else ratio for dim, ratio in widths_of(config).items()
    }


def learn_alike() -> None:
    """muP: every weight learns at the base model's rate."""
    import parallel.zero.engine as engine

    engine.widths_of = lambda config: {}


def draw_by_own_fans() -> None:
    """He initialization: a tp rank draws a matrix by the fan-in of its own part of it."""
    import modeling.logical as logical
    import parallel.zero.engine as engine
    from parallel.layout import AXIS_OF

    kind: Any = logical.LogicalTensor
    draw, fans = engine.initial_box, kind.fans

    def own(self: Any) -> tuple[int, int]:
        fan_in, fan_out = fans.__get__(self)
        return (fan_in // 2 if AXIS_OF[self.weight.dims[-1]] == "tp" else fan_in), fan_out

    def drawn(*arguments: Any) -> Any:
        kind.fans = property(own)
        try:
            return draw(*arguments)
        finally:
            kind.fans = fans

    engine.initial_box = drawn
