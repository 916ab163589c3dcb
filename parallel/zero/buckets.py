"""Buckets: sets of weights whose gradients are reduced by one collective, as soon as a backward pass has made them all.

Each bucket is a parameter group of torch's optimizer, so DeepSpeed keeps its masters as one flat tensor of which every
replica has an equal part. The collective gives a rank that part of the reduced gradient, to be added to its sums.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.mesh import Axis
from parallel.zero.accumulation import PLAIN, Accumulation

Group = dict[str, Any]  # of torch's optimizer
Stages = tuple[int, ...]  # some of this rank's stages, numbered from 0 on this rank


def stages_of(weight: nn.Parameter, stages: Sequence[AbstractSet[nn.Parameter]]) -> Stages:
    """The numbers of this rank's stages that compute with a weight: two for an embedding used at both ends."""
    return tuple(number for number, weights in enumerate(stages) if weight in weights)


def cut_into_buckets(groups: Sequence[Group], most: int, alike: Callable[[nn.Parameter], Any]) -> list[Group]:
    """The optimizer's groups divided into buckets of at most ``most`` elements, each of consecutive weights of a group.

    A weight with more elements has a bucket of its own. All weights of one bucket have the same value of ``alike``.
    """
    buckets = []
    for group in groups:
        weights: list[nn.Parameter] = group["params"]
        starts, n_elements = [0], weights[0].numel()
        for number, (before, weight) in enumerate(pairwise(weights), 1):
            n_elements += weight.numel()
            if n_elements > most or alike(weight) != alike(before):
                starts.append(number)
                n_elements = weight.numel()
        buckets += [{**group, "params": weights[start:stop]} for start, stop in pairwise([*starts, len(weights)])]
    return buckets


class Bucket:
    """One bucket on this rank: the gradients of the present pass, and this rank's part of the sum of earlier passes.

    ``total`` is that sum, in fp32 and in the layout of the bucket's master. ``numel`` counts the elements of all ranks'
    parts, with the padding.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        stages: Stages,
        axis: Axis,
        total: Tensor,
        accumulation: Accumulation = PLAIN,
    ) -> None:
        self.accumulation = accumulation
        self.weights = list(weights)
        self.stages = stages
        self.axis = axis
        self.total = total
        self.numel = total.numel() * axis.degree
        self.made: dict[nn.Parameter, Tensor] = {}  # by weight, the gradients of the present pass
        self.is_begun = False  # whether the total has gradients of this step

    @property
    def padding(self) -> int:
        """The number of padding elements, which follow those of the last weight."""
        return self.numel - sum(weight.numel() for weight in self.weights)

    @property
    def is_complete(self) -> bool:
        """Whether the pass has made every weight's gradient."""
        return len(self.made) == len(self.weights)

    def take(self, weight: nn.Parameter) -> None:
        """Moves a weight's gradient from its ``.grad`` into the bucket."""
        assert weight.grad is not None and weight not in self.made, "two gradients of one weight in one pass"
        self.made[weight], weight.grad = weight.grad, None

    @torch.no_grad()
    def packed(self, dtype: torch.dtype) -> Tensor:
        """The pass's gradients as one flat tensor of ``numel`` elements, in the weights' order; zeros for missing ones.

        The gradients are released.
        """
        flat = torch.empty(self.numel, dtype=dtype, device=self.total.device)
        start = 0
        for weight in self.weights:
            place, gradient = flat.narrow(0, start, weight.numel()), self.made.pop(weight, None)
            start += weight.numel()
            if gradient is None:
                place.zero_()
            else:
                self.accumulation.write(place, gradient.reshape(-1))
        flat[start:].zero_()
        return flat

    @torch.no_grad()
    def add(self, part: Tensor) -> None:
        """Adds this rank's part of a reduced pass to ``total``; a step's first part overwrites the last step's sum."""
        if self.is_begun:
            self.total += part
        else:
            self.total.copy_(part)
        self.is_begun = True

    @torch.no_grad()
    def end(self, factor: float) -> None:
        """Ends a step: ``total`` is multiplied by ``factor``, or is zero if no pass of the step gave a gradient."""
        if self.is_begun:
            self.total *= factor
        else:
            self.total.zero_()
        self.is_begun = False


class WholeBucket(Bucket):
    """A bucket whose passes are summed before they are reduced.

    The sums lie in ``whole``: fp32, in the layout of the flat weights. This rank's ``total`` is a view of its part.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        stages: Stages,
        axis: Axis,
        part: Tensor,
        accumulation: Accumulation = PLAIN,
    ) -> None:
        """``part``: a tensor with the length and device of this rank's part; its values are not used."""
        numel = part.numel()
        self.whole = torch.zeros(numel * axis.degree, dtype=torch.float32, device=part.device)
        super().__init__(weights, stages, axis, self.whole.narrow(0, axis.rank * numel, numel), accumulation)
        self.places = dict(
            zip(weights, self.whole.split([*map(nn.Parameter.numel, weights), self.padding]), strict=False)
        )
        self.begun: set[nn.Parameter] = set()  # the weights with a sum of this step

    @torch.no_grad()
    def take(self, weight: nn.Parameter) -> None:
        """Adds a weight's gradient to its sum; a step's first gradient overwrites the previous step's sum."""
        super().take(weight)
        gradient = self.made[weight].reshape(-1)
        if weight in self.begun:
            self.accumulation.add(self.places[weight], gradient)
        else:
            self.accumulation.write(self.places[weight], gradient)
        self.begun.add(weight)
        self.made[weight] = gradient[:0]  # records that the gradient was made; its values are not needed any more

    @torch.no_grad()
    def packed(self, dtype: torch.dtype) -> Tensor:
        """The flat sums over the step's passes (``whole``), with zeros for weights that got no gradient."""
        assert dtype == self.whole.dtype, "sums in fewer bits lose what is small"
        for weight, place in self.places.items():
            if weight not in self.begun:
                place.zero_()
        self.made.clear()
        self.begun.clear()
        return self.whole


class Flight:
    """One bucket's reduction, from its start until ``land`` waits for it."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype, *, exchanges: bool) -> None:
        """Starts the reduction. All ranks of the bucket's axis start theirs, in the same order.

        Before: each rank has the whole bucket's gradients, a summand. After ``land``: this rank has the sum of its
        part. ``exchanges``: an all-to-all sends each rank its part of all summands, which it sums in fp32; else a
        reduce-scatter sums them in ``dtype``. Bytes: (n-1)/n of the bucket's in ``dtype``, n being the axis's degree.
        """
        self.bucket, self.exchanges = bucket, exchanges
        flat, axis = bucket.packed(dtype), bucket.axis
        self.sent = flat  # held until the collective has ended
        if exchanges:
            self.received = torch.empty_like(flat)
            self.work = dist.all_to_all_single(self.received, flat, group=axis.group, async_op=True)
        else:
            self.received = flat.new_empty(bucket.total.numel())
            self.work = dist.reduce_scatter_tensor(self.received, flat, group=axis.group, async_op=True)

    def land(self) -> None:
        """Waits for the reduction, and adds its result to the bucket's sum."""
        assert self.work is not None
        self.work.wait()
        part = self.received
        if self.exchanges:
            part = torch.sum(part.view(self.bucket.axis.degree, -1), 0, dtype=torch.float32)
        self.bucket.add(part)
