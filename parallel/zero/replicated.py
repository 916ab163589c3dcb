"""ZeRO 0: every rank holds all of its model's weights, gradients and optimizer states, in fp32."""

import math

import torch.distributed as dist
from torch import Tensor, nn

from modeling.optimizers.rule import UpdateRule
from parallel.matrices import CutMatrices
from parallel.mesh import Axis
from parallel.zero.fragments import Share, even_share
from parallel.zero.sharding import HeldGradient, Sharding
from parallel.zero.weights import HeldWeight


class Replicated(Sharding):
    """ZeRO 0: DeepSpeed averages gradients over the replicas, and torch's optimizer does the rest."""

    stage = 0
    clips = False  # DeepSpeed's norm at this stage is wrong for experts

    def optimizer_class(self) -> None:
        """None, since DeepSpeed does not wrap torch's optimizer."""

    def gradients(self) -> list[HeldGradient]:
        """The weights with their whole gradients, which every replica holds."""
        weights = self.weights.items()
        return [(p, p.grad, weight.replicas.degree) for p, weight in weights if p.grad is not None]

    def flat_gradient(self, flat: Tensor) -> Tensor:
        """The weight's whole gradient, flat in fp32; zeros where no pass gave it one."""
        return (flat.new_zeros(flat.shape) if flat.grad is None else flat.grad.detach()).float().view(-1)

    def share_of(self, weight: HeldWeight) -> Share | None:
        """An even share of the weight, though this rank has all of it: so each element is saved by one replica."""
        start, numel = even_share(weight.parameter.numel(), weight.replicas)
        return Share(start, numel, weight.parameter, start) if numel > 0 else None

    def flats(self) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """The weights themselves, each a tensor of its own."""
        return [(parameter, [parameter]) for parameter in self.weights]

    def matrices(self, rule: UpdateRule) -> CutMatrices:
        """The object that gathers the matrices that tp cuts; every rank has all others whole."""
        return self.cut_matrices()

    def step(self, norm: Tensor) -> bool:
        """Clips by ``norm`` and applies the gradients, or drops them and returns True if ``norm`` is not finite."""
        value = float(norm)
        if not math.isfinite(value):
            self.drop()
            return True
        if self.clip_norm is not None and value + 1e-6 > self.clip_norm:
            for _, gradient, _ in self.gradients():
                gradient.mul_(self.clip_norm / (value + 1e-6))
        self.deepspeed.set_gradient_accumulation_boundary(True)
        self.deepspeed.step()
        return False

    def drop(self) -> None:
        """Drops the gradients."""
        self.deepspeed.zero_grad()

    def publish(self, rule: UpdateRule) -> None:
        """Completes every weight and its states from all replicas' shares, of which each rank has written its own."""
        for parameter, weight in self.weights.items():
            states = self.base.state[parameter]
            for whole in (parameter, *(states[name] for name in rule.states_of(weight.weight))):
                complete(whole, weight.replicas)


def complete(whole: Tensor, axis: Axis) -> None:
    """Completes a tensor of which each rank of the axis has written its even share. All ranks of the axis call it.

    Before: each rank's own share is valid. After: the same whole tensor on all. Each rank broadcasts its share.
    """
    flat = whole.data.view(-1)
    size = -(-flat.numel() // axis.degree)
    for position, rank in enumerate(axis.ranks):
        start = min(position * size, flat.numel())
        part = flat.narrow(0, start, min(size, flat.numel() - start))
        if part.numel():
            dist.broadcast(part, rank, group=axis.group)
