"""Faults in what the optimizer makes of right gradients. For prove_faults.plant."""

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
    """The last group of weights never learns of another learning rate than the first step's."""
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
    """Muon takes the experts of a rank's stack as one matrix."""
    import modeling.optimizers.orthogonal as muon

    orthogonal = muon.orthogonal
    muon.orthogonal = lambda matrices: orthogonal(matrices.flatten(0, -2)).view_as(matrices)


def leave_parts() -> None:
    """Muon orthogonalizes what the rank holds of a matrix that tp cuts."""
    from parallel.matrices import CutMatrices

    CutMatrices.gather = lambda self, weight, part: part
    CutMatrices.own_part = lambda self, weight, whole: whole


def round_masters() -> None:
    """Each update leaves the masters in bf16's precision."""
    from parallel.zero.engine import Engine

    step = Engine.step

    def rounding(self: Any, lr: float) -> Any:
        result = step(self, lr)
        for flat in {id(fragment.flat): fragment.flat for fragment in self.fragments}.values():
            flat.data.copy_(flat.data.bfloat16())
        return result

    Engine.step = rounding
