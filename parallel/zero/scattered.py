"""ZeRO 1 whose gradients are reduce-scattered in buckets during backward passes: a rank gets the part that it updates.

While one bucket is on its way the pass goes on (Megatron's ``overlap_grad_reduce``). Where each micro-batch's gradients
are reduced, a rank holds no whole gradients between passes, and M micro-batches send M times the bytes of one reduction
a step. Summing in fp32 on the receiving rank is Megatron's ``reduce_scatter_with_fp32_accumulation``.
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

MOST_FLIGHTS = 2  # buckets on their way at once, a bound since each holds memory


class Zero1Scattered(Zero1):
    """ZeRO 1, in every precision, that reduces each micro-batch's gradients, widened to fp32, by reduce-scatters.

    Every pass reduces the buckets of its stage in one fixed order, which begins with the last layers: each bucket as
    soon as it and those before it are complete, the rest at the pass's end. So all replicas issue the same collectives
    in the same order, also relative to those of other axes (``needs_equal_graphs``).
    """

    needs_equal_graphs = True
    zeroes_sums = False
    scatters = True
    sums_here = True
    exchanges: ClassVar = False
    bucket_class: ClassVar[type[Bucket]] = Bucket

    def optimizer_class(self) -> type:
        """The subclass of DeepSpeedZeroOptimizer that is given the sums of gradients."""
        return self.patches.ZeroOptimizer1GivenSums

    def cut_groups(
        self, groups: list[Group], stages: Sequence[Collection[nn.Parameter]], tied: nn.Parameter | None
    ) -> list[Group]:
        """The groups divided into buckets. The weights of one bucket are of the same stages.

        The tied weight has a bucket of its own, so that both ranks that hold a copy partition it alike.
        """
        self.stages = [set(weights) for weights in stages]

        def alike(weight: nn.Parameter) -> tuple[tuple[int, ...], bool]:
            return stages_of(weight, self.stages), weight is tied

        return cut_into_buckets(groups, self.reduced, alike)

    def open(self, model: Decoder, base: torch.optim.Optimizer, weights: Mapping[nn.Parameter, HeldWeight]) -> None:
        """Hands model and optimizer to DeepSpeed, makes the buckets, and hooks each weight's gradient (``take``)."""
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
        self.n_launched = [0 for _ in self.stages]  # by stage, buckets of its order launched in the present pass
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self.take)

    def take(self, weight: Tensor) -> None:
        """Called by autograd when a pass has made a weight's gradient: moves it to its bucket, and launches buckets."""
        assert isinstance(weight, nn.Parameter)
        bucket = self.bucket_of[weight]
        bucket.take(weight)
        if self.reduces_now and len(bucket.stages) == 1:  # with two stages, the pass's end tells which
            self.launch(bucket.stages[0], all_of_them=False)

    @property
    def reduces_now(self) -> bool:
        """Whether the gradients of the present pass are reduced during it."""
        return True

    def launch(self, stage: int, *, all_of_them: bool) -> None:
        """Starts reducing the stage's next buckets, up to the first incomplete one, or ``all_of_them``."""
        order = self.orders[stage]
        while self.n_launched[stage] < len(order):
            bucket = order[self.n_launched[stage]]
            if not all_of_them and (not bucket.is_complete or len(bucket.stages) > 1):
                return
            self.n_launched[stage] += 1
            self.reduce(bucket)

    def reduce(self, bucket: Bucket) -> None:
        """Starts reducing one bucket; where no other rank holds its weights, adds its gradients to the sum at once."""
        if bucket.axis.degree == 1:
            bucket.add(bucket.packed(torch.float32))
            return
        while len(self.flights) >= MOST_FLIGHTS:
            self.flights.pop(0).land()
        self.flights.append(Flight(bucket, self.wire, exchanges=self.exchanges))

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which gradients are sent."""
        return torch.float32

    def end_pass(self, stage: int) -> None:
        """Ends one pass through a stage: starts reducing its remaining buckets. All replicas of the stage call it."""
        for bucket in self.orders[stage]:
            for weight in bucket.weights:
                if weight.grad is not None:  # zero-bubble schedules make gradients without calling autograd's hooks
                    bucket.take(weight)
        if self.reduces_now:
            self.launch(stage, all_of_them=True)
        self.n_launched[stage] = 0

    def land_all(self) -> None:
        """Waits for all reductions that are on their way."""
        while self.flights:
            self.flights.pop(0).land()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """One micro-batch's backward pass, whose gradients are reduced during it."""
        torch.autograd.backward(loss)
        self.end_pass(0)
        if last:
            self.reduce_all()

    def reduce_all(self) -> None:
        """Gives DeepSpeed this rank's parts of the sums, divided by the number of ranks that replicate dense weights.

        Waits for the reductions first. Division by that number is DeepSpeed's own averaging.
        """
        self.land_all()
        for group, bucket in enumerate(self.buckets):
            bucket.end(1 / self.mesh.replicas.degree)
            self.optimizer.averaged_gradients[group] = [bucket.total]

    @contextmanager
    def collect(self, finish: Callable[[], None]) -> Iterator[None]:
        """The context of a pipeline's passes, which reduce gradients; on leaving, all reductions end.

        Then ``finish`` is called, by which copies of a tied weight add up their parts.
        """
        yield
        self.reduce_what_is_left()
        self.land_all()
        finish()
        self.reduce_all()

    def reduce_what_is_left(self) -> None:
        """Does nothing here: the passes of a pipeline have reduced all buckets."""

    def after_backward(self, stage: nn.Module) -> None:
        """Ends one micro-batch's pass through a stage of the pipeline."""
        weights = set(stage.parameters())
        self.end_pass(next(number for number, each in enumerate(self.stages) if weights == each))

    def total(self, weight: nn.Parameter) -> Tensor:
        """This rank's part of the sum of a tied weight's gradients, which has a bucket of its own."""
        bucket = self.bucket_of[weight]
        assert bucket.weights == [weight] and bucket.is_begun, "a tied weight has a bucket, and takes part in each pass"
        return bucket.total

    def gradients(self) -> list[HeldGradient]:
        """The weights with this rank's parts of their reduced gradients."""
        found: list[HeldGradient] = []
        for bucket in self.buckets:
            for parameter in bucket.weights:
                share = self.share_of(self.weights[parameter])
                if share is not None:
                    found.append((parameter, bucket.total.narrow(0, share.offset, share.numel), 1))
        return found

    def flat_gradient(self, flat: Tensor) -> Tensor:
        """This rank's part of the bucket's summed gradients, with the padding last."""
        return self.buckets[position(self.optimizer.single_partition_of_fp32_groups, flat)].total


class Zero1Exchanged(Zero1Scattered):
    """Sends gradients in the weights' dtype, as autograd made them, by all-to-alls; each rank sums them in fp32.

    Nothing more is rounded: with 16-bit weights half of fp32's bytes are sent, and the sums are the same except for the
    order of their summands.
    """

    exchanges = True

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which gradients are sent: the weights' own."""
        return self.dtype


class Zero1OfLastPass(Zero1Scattered):
    """Sums whole gradients over the micro-batches, and reduces the sums during the step's last backward pass.

    Under a pipeline they are reduced when the rank's last pass is over. Half the bytes of an all-reduce are sent.
    """

    scatters = False
    bucket_class = WholeBucket
    is_last = False  # whether the pass under way is a step's last

    @property
    def reduces_now(self) -> bool:
        """Whether the present pass is the step's last, the only one during which gradients are reduced."""
        return self.is_last

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """One micro-batch's backward pass; during a step's last one the buckets are reduced."""
        self.is_last = last
        super().backward(loss, last=last)
        self.is_last = False

    def end_pass(self, stage: int) -> None:
        """Ends one pass through a stage: which weights got a gradient in it is forgotten before the next pass."""
        super().end_pass(stage)
        for bucket in self.orders[stage]:
            bucket.made.clear()

    def reduce_what_is_left(self) -> None:
        """Starts reducing all buckets, after a pipeline's last pass."""
        for bucket in self.in_order:
            self.reduce(bucket)
