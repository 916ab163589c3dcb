"""ZeRO 1 whose gradients are reduced in buckets during backward passes, each rank getting the part that it updates.

While one bucket is on its way the pass goes on (Megatron's ``overlap_grad_reduce``). Where each micro-batch's gradients
are reduced, a rank holds no whole gradients between passes, and what is sent is M times that of one reduction a step,
for M micro-batches. Receivers that sum in fp32 are Megatron's ``reduce_scatter_with_fp32_accumulation``.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from modeling.decoder import Decoder
from parallel.zero.buckets import Bucket, Flight, Group, WholeBucket, cut_into_buckets, stages_of
from parallel.zero.fragments import position
from parallel.zero.sharding import HeldGradient
from parallel.zero.weights import HeldWeight
from parallel.zero.zero12 import Zero1

MOST_FLIGHTS = 2  # buckets on their way at once: what they hold is memory


class Zero1Scattered(Zero1):
    """In every precision. Gradients are widened to fp32 and summed on their way (reduce-scatter).

    Every pass reduces the buckets of its stage in one order, which begins with the last layers; each as soon as it and
    those before it are complete, the rest at the pass's end. So all replicas issue the same collectives in the same
    order, among those of other axes too (``needs_equal_graphs``).
    """

    needs_equal_graphs = True
    zeroes_sums = False
    scatters = True
    sums_here = True
    exchanges: ClassVar = False
    bucket_class: ClassVar[type[Bucket]] = Bucket

    def optimizer_class(self) -> type:
        """Our subclass of DeepSpeedZeroOptimizer to which we give the sums."""
        return self.patches.ZeroOptimizer1GivenSums

    def cut_groups(
        self, groups: list[Group], stages: Sequence[Collection[nn.Parameter]], tied: nn.Parameter | None
    ) -> list[Group]:
        """Buckets: of weights of the same stages, and one of the tied weight, so that both its ranks cut it alike."""
        self.stages = [set(weights) for weights in stages]

        def alike(weight: nn.Parameter) -> tuple[tuple[int, ...], bool]:
            return stages_of(weight, self.stages), weight is tied

        return cut_into_buckets(groups, self.reduced, alike)

    def open(self, model: Decoder, base: torch.optim.Optimizer, weights: Mapping[nn.Parameter, HeldWeight]) -> None:
        """As ``Zero1``, and has autograd give each gradient to its bucket."""
        super().open(model, base, weights)
        self.flights: list[Flight] = []
        self.buckets = [
            self.bucket_class(
                parameters,
                stages_of(parameters[0], self.stages),
                weights[parameters[0]].replicas,
                torch.zeros_like(flat, requires_grad=False),
                self.accumulation,
            )
            for flat, parameters in self.flats()
        ]
        self.bucket_of = {weight: bucket for bucket in self.buckets for weight in bucket.weights}
        places = {weight: place for place, weight in enumerate(weights)}
        self.in_order = sorted(self.buckets, key=lambda bucket: -min(places[weight] for weight in bucket.weights))
        self.orders = [[each for each in self.in_order if number in each.stages] for number in range(len(self.stages))]
        self.n_launched = [0 for _ in self.stages]  # of each stage's order, in the pass under way
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self.take)

    def take(self, weight: Tensor) -> None:
        """Called by autograd when a pass has made a weight's gradient."""
        assert isinstance(weight, nn.Parameter)
        bucket = self.bucket_of[weight]
        bucket.take(weight)
        if self.reduces_now and len(bucket.stages) == 1:  # whose pass this is of two stages, its end tells
            self.launch(bucket.stages[0], all_of_them=False)

    @property
    def reduces_now(self) -> bool:
        """Whether the gradients of the pass under way are reduced."""
        return True

    def launch(self, stage: int, *, all_of_them: bool) -> None:
        """Begins to reduce the stage's next buckets, while they are complete."""
        order = self.orders[stage]
        while self.n_launched[stage] < len(order):
            bucket = order[self.n_launched[stage]]
            if not all_of_them and (not bucket.is_complete or len(bucket.stages) > 1):
                return
            self.n_launched[stage] += 1
            self.reduce(bucket)

    def reduce(self, bucket: Bucket) -> None:
        """Begins to reduce one bucket; where no other rank has its weights, adds it up at once."""
        if bucket.axis.degree == 1:
            bucket.add(bucket.packed(torch.float32))
            return
        while len(self.flights) >= MOST_FLIGHTS:
            self.flights.pop(0).land()
        self.flights.append(Flight(bucket, self.wire, exchanges=self.exchanges))

    @property
    def wire(self) -> torch.dtype:
        """The dtype of what is sent."""
        return torch.float32

    def end_pass(self, stage: int) -> None:
        """Begins to reduce what one pass through a stage has left. The ranks of the stage's replicas all call it."""
        for bucket in self.orders[stage]:
            for weight in bucket.weights:
                if weight.grad is not None:  # zero-bubble schedules make gradients without autograd's hooks
                    bucket.take(weight)
        if self.reduces_now:
            self.launch(stage, all_of_them=True)
        self.n_launched[stage] = 0

    def land_all(self) -> None:
        """Waits for what is on its way."""
        while self.flights:
            self.flights.pop(0).land()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """One pass, whose gradients are reduced meanwhile."""
        torch.autograd.backward(loss)
        self.end_pass(0)
        if last:
            self.reduce_all()

    def reduce_all(self) -> None:
        """Gives DeepSpeed this rank's parts, averaged as it averages: over the ranks that replicate dense weights."""
        self.land_all()
        for group, bucket in enumerate(self.buckets):
            bucket.end(1 / self.mesh.replicas.degree)
            self.optimizer.averaged_gradients[group] = [bucket.total]

    @contextmanager
    def collect(self, finish: Callable[[], None]) -> Iterator[None]:
        """Gradients are reduced within; copies of a tied weight add up their parts."""
        yield
        self.reduce_what_is_left()
        self.land_all()
        finish()
        self.reduce_all()

    def reduce_what_is_left(self) -> None:
        """Does nothing: the passes of a pipeline have reduced all."""

    def after_backward(self, stage: nn.Module) -> None:
        """The end of one micro-batch's pass through a stage."""
        weights = set(stage.parameters())
        self.end_pass(next(number for number, each in enumerate(self.stages) if weights == each))

    def total(self, weight: nn.Parameter) -> Tensor:
        """This rank's part of the sum, in a bucket of the weight alone."""
        bucket = self.bucket_of[weight]
        assert bucket.weights == [weight] and bucket.is_begun, "a tied weight has a bucket, and takes part in each pass"
        return bucket.total

    def gradients(self) -> list[HeldGradient]:
        """This rank's parts of the gradients that are reduced."""
        found: list[HeldGradient] = []
        for bucket in self.buckets:
            for parameter in bucket.weights:
                share = self.share_of(self.weights[parameter])
                if share is not None:
                    found.append((parameter, bucket.total.narrow(0, share.offset, share.numel), 1))
        return found

    def flat_gradient(self, flat: Tensor) -> Tensor:
        """The bucket's sum, padding last."""
        return self.buckets[position(self.optimizer.single_partition_of_fp32_groups, flat)].total


class Zero1Exchanged(Zero1Scattered):
    """Gradients travel in the weights' dtype, as autograd made them; every rank sums in fp32 what it receives.

    Nothing is rounded that was not: half the bytes of fp32 where weights have 16 bits, for the same sums but for the
    order of their summands.
    """

    exchanges = True

    @property
    def wire(self) -> torch.dtype:
        """The weights' dtype."""
        return self.dtype


class Zero1OfLastPass(Zero1Scattered):
    """Sums of whole gradients stay until the step's last backward pass, during which they are reduced.

    Under a pipeline they are reduced when the rank's last pass is over. What is sent is half of an all-reduce's.
    """

    scatters = False
    bucket_class = WholeBucket
    is_last = False  # whether the pass under way is a step's last

    @property
    def reduces_now(self) -> bool:
        """Whether this is the step's last pass."""
        return self.is_last

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """One pass; the last one's buckets are reduced meanwhile."""
        self.is_last = last
        super().backward(loss, last=last)
        self.is_last = False

    def end_pass(self, stage: int) -> None:
        """A weight that the pass gave no gradient is none of the next pass's."""
        super().end_pass(stage)
        for bucket in self.orders[stage]:
            bucket.made.clear()

    def reduce_what_is_left(self) -> None:
        """Reduces all buckets."""
        for bucket in self.in_order:
            self.reduce(bucket)
