"""Buckets: the weights whose gradients are reduced by one collective, as soon as a backward pass has made them.

Each bucket is a group of torch's optimizer, so DeepSpeed keeps its masters as one flat tensor of which every replica
has an equal part: the collective's result is what the rank adds to its sums.
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
Stages = tuple[int, ...]  # of this rank's stages, by their places among them


def stages_of(weight: nn.Parameter, stages: Sequence[AbstractSet[nn.Parameter]]) -> Stages:
    """The stages that compute with a weight: two where one rank has the embedding at both ends of the model."""
    return tuple(number for number, weights in enumerate(stages) if weight in weights)


def cut_into_buckets(groups: Sequence[Group], most: int, alike: Callable[[nn.Parameter], Any]) -> list[Group]:
    """The optimizer's groups cut into buckets: of each group's weights, in order, as many as have ``most`` elements.

    A weight with more elements has a bucket of its own. Those of one bucket are ``alike``.
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
    """One bucket on this rank: gradients of the pass under way, and the sum of this rank's part of all before.

    ``total`` is fp32 and laid out as the bucket's master is. ``numel`` counts all ranks' parts, and the padding.
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
        self.made: dict[nn.Parameter, Tensor] = {}  # by weight, what the pass under way has given
        self.is_begun = False  # whether the total holds something of this step

    @property
    def padding(self) -> int:
        """Elements after the last weight's."""
        return self.numel - sum(weight.numel() for weight in self.weights)

    @property
    def is_complete(self) -> bool:
        """Whether the pass has made every weight's gradient."""
        return len(self.made) == len(self.weights)

    def take(self, weight: nn.Parameter) -> None:
        """Takes a weight's gradient out of its ``.grad``."""
        assert weight.grad is not None and weight not in self.made, "two gradients of one weight in one pass"
        self.made[weight], weight.grad = weight.grad, None

    @torch.no_grad()
    def packed(self, dtype: torch.dtype) -> Tensor:
        """The pass's gradients, laid out as the flat weights are; zeros for those that it did not make."""
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
        """Adds this rank's part of a reduced pass: a step's first is written over what the last step has left."""
        if self.is_begun:
            self.total += part
        else:
            self.total.copy_(part)
        self.is_begun = True

    @torch.no_grad()
    def end(self, factor: float) -> None:
        """The step's passes are over: the total becomes ``factor`` times the sum."""
        if self.is_begun:
            self.total *= factor
        else:
            self.total.zero_()
        self.is_begun = False


class WholeBucket(Bucket):
    """A bucket whose passes are added up before they are reduced, in ``whole``: fp32, laid out as the flat weights are.

    Of it this rank's ``total`` is a part.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        stages: Stages,
        axis: Axis,
        part: Tensor,
        accumulation: Accumulation = PLAIN,
    ) -> None:
        """``part`` is as long as this rank's part."""
        numel = part.numel()
        self.whole = torch.zeros(numel * axis.degree, dtype=torch.float32, device=part.device)
        super().__init__(weights, stages, axis, self.whole.narrow(0, axis.rank * numel, numel), accumulation)
        self.places = dict(
            zip(weights, self.whole.split([*map(nn.Parameter.numel, weights), self.padding]), strict=False)
        )
        self.begun: set[nn.Parameter] = set()  # the weights with a sum of this step

    @torch.no_grad()
    def take(self, weight: nn.Parameter) -> None:
        """Adds a weight's gradient to its sum: a step's first is written over what the last step has left."""
        super().take(weight)
        gradient = self.made[weight].reshape(-1)
        if weight in self.begun:
            self.accumulation.add(self.places[weight], gradient)
        else:
            self.accumulation.write(self.places[weight], gradient)
        self.begun.add(weight)
        self.made[weight] = gradient[:0]  # it was made, and is needed no more

    @torch.no_grad()
    def packed(self, dtype: torch.dtype) -> Tensor:
        """The sums over the passes."""
        assert dtype == self.whole.dtype, "sums in fewer bits lose what is small"
        for weight, place in self.places.items():
            if weight not in self.begun:
                place.zero_()
        self.made.clear()
        self.begun.clear()
        return self.whole


class Flight:
    """One bucket's reduction under way."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype, *, exchanges: bool) -> None:
        """Begins it: all ranks of the bucket's axis do, in the same order. Bytes sent: (n-1)/n of the bucket's.

        ``exchanges``: every rank sends the others their parts as they are, and sums in fp32 what it receives (an
        all-to-all); else the collective sums on the way (a reduce-scatter).
        """
        self.bucket, self.exchanges = bucket, exchanges
        flat, axis = bucket.packed(dtype), bucket.axis
        self.sent = flat  # held until it is there
        if exchanges:
            self.received = torch.empty_like(flat)
            self.work = dist.all_to_all_single(self.received, flat, group=axis.group, async_op=True)
        else:
            self.received = flat.new_empty(bucket.total.numel())
            self.work = dist.reduce_scatter_tensor(self.received, flat, group=axis.group, async_op=True)

    def land(self) -> None:
        """Waits for it, and adds the result to the bucket's sum."""
        assert self.work is not None
        self.work.wait()
        part = self.received
        if self.exchanges:
            part = torch.sum(part.view(self.bucket.axis.degree, -1), 0, dtype=torch.float32)
        self.bucket.add(part)
