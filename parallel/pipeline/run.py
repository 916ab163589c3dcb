"""Runs micro-batches through the pipeline: training by torch's schedules, evaluation by Roundtable's own loop.

Shape letters: B batch, S sequence, D d_model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from modeling.decoder import Decoder, Output
from parallel.batch import MicroBatch
from parallel.mesh import Axis
from parallel.pipeline.config import PipelineConfig, stage_ranks
from parallel.pipeline.schedule import build_schedule
from parallel.pipeline.stages import Part, Stage, merge_outputs, meta_example

AfterBackward = Callable[[nn.Module], None]


Neighbours = Mapping[int, dist.ProcessGroup]  # global rank of a neighbour -> group of two (parallel.mesh.Mesh)


class ScheduledStage(PipelineStage):
    """A torch PipelineStage that calls ``after_backward(stage)`` once a micro-batch's weight gradients are complete.

    It sends and receives in ``neighbours``, groups of this rank and one neighbour each. NCCL executes the transfers of
    one group in the order in which they were begun, and torch begins receives early: in a group of all stages a
    receive that waits for the previous stage would hold up the send that the next stage waits for.
    """

    def __init__(
        self,
        stage: Stage,
        axis: Axis,
        hidden: Tensor,
        device: torch.device,
        after_backward: AfterBackward,
        neighbours: Neighbours,
    ) -> None:
        number, loss = meta_example((1,), torch.int64), meta_example((), torch.float64)
        super().__init__(
            stage,
            stage.part.stage,
            stage.part.n_stages,
            device,
            input_args=(number if stage.part.has_embedding else hidden,),
            output_args=(loss if stage.part.has_head else hidden,),
            group=axis.group,
        )
        self.after_backward = after_backward
        self.neighbours = neighbours

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of a micro-batch's hidden states from the previous stage."""
        return self.by_twos(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of the gradients by the hidden states that this stage has sent on."""
        return self.by_twos(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of a micro-batch's hidden states to the next stage."""
        return self.by_twos(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of the gradients by the hidden states that this stage has received."""
        return self.by_twos(super().get_bwd_send_ops(bwd_chunk_id))

    def by_twos(self, transfers: Sequence[dist.P2POp]) -> list[dist.P2POp]:
        """The same transfers, each in the group of its two ranks where ``neighbours`` has one."""
        return [
            dist.P2POp(each.op, each.tensor, each.peer, self.neighbours.get(each.peer, each.group))
            for each in transfers
        ]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The first transfers, which open connections, without those of this rank to itself (two stages in a row).

        torch 2.11 makes such transfers under all schedules, and gloo cannot connect a rank to itself.
        """
        assert self.group is not None
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group.rank()]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of one micro-batch, whole or of inputs only."""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self.after_backward(self.submod)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The part of one micro-batch's backward pass that computes the weights' gradients."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.after_backward(self.submod)


class Pipeline:
    """This rank's pipeline stages, and the schedule that trains them.

    Every rank of the pp axis must call ``train`` or ``evaluate`` with the same micro-batches, all of one shape.
    ``hidden_shape`` and ``dtype``: those of the hidden states (B, S, D) that this rank sends, S being its share under
    cp and tp. torch keeps a receive buffer for each micro-batch of a step: hidden states for each of this rank's stages
    but the model's first, and gradients for each but the last.
    """

    def __init__(
        self,
        model: Decoder,
        parts: Sequence[Part],
        config: PipelineConfig,
        axis: Axis,
        *,
        hidden_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.config = config
        self.axis = axis
        self.neighbours = neighbours or {}
        self.device = device
        self.hidden = meta_example(hidden_shape, dtype)
        self.stages = [Stage(model, part) for part in parts]
        self.after_backward: AfterBackward = ignore
        self.scale: float | Tensor = 1.0
        self.schedule: Any = None  # made for n_micro_batches, with its buffers
        self.scheduled: list[ScheduledStage] = []
        self.n_micro_batches = 0

    def train(
        self, micro_batches: Sequence[MicroBatch], scale: float | Tensor, after_backward: AfterBackward | None = None
    ) -> list[Output]:
        """One Output for each micro-batch, after the forward and backward passes of all. All ranks call it.

        An Output has the statistics of this rank's layers, and the losses on the rank of the head. The gradients,
        summed over micro-batches, are left in the weights' ``.grad``. Differentiated is the sum of the targets'
        cross-entropies times ``scale``, plus the auxiliary losses as the contexts weigh them. ``after_backward`` is
        called with a stage each time one micro-batch's gradients of that stage's weights are complete.
        """
        count = len(micro_batches)
        if count != self.n_micro_batches:
            self.prepare(count)
        self.scale, self.after_backward = scale, after_backward or ignore
        for stage in self.stages:
            stage.open(micro_batches)
        numbers = torch.arange(count)
        first = (numbers,) if self.stages[0].part.has_embedding else ()
        self.schedule.step(*first, target=numbers, return_outputs=False, number=numbers)
        return merge_outputs([stage.close() for stage in self.stages], count)

    def prepare(self, n_micro_batches: int) -> None:
        """Makes the schedule for steps of ``n_micro_batches``; the first step allocates the receive buffers."""
        self.n_micro_batches = n_micro_batches
        self.scheduled = [
            ScheduledStage(stage, self.axis, self.hidden, self.device, self.tell_gradients, self.neighbours)
            for stage in self.stages
        ]
        self.schedule = build_schedule(self.config, self.scheduled, n_micro_batches, self.scaled_loss)

    def tell_gradients(self, stage: nn.Module) -> None:
        """Calls the ``after_backward`` that ``train`` was given for this step."""
        self.after_backward(stage)

    def scaled_loss(self, loss: Tensor, _: Tensor) -> Tensor:
        """The loss that the last stage differentiates: the summed loss times this step's scale."""
        return loss * self.scale

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> list[Output]:
        """One Output for each micro-batch, after forward passes without gradients. All ranks call it.

        Any number of micro-batches is allowed. An Output has the statistics of this rank's layers, and the losses on
        the rank of the head. At time t stage s computes micro-batch t - s. Between two times each rank starts all its
        transfers of the previous time's results at once: with NCCL a send ends only with its receive, so single sends
        and receives would wait for each other in a circle.
        """
        for stage in self.stages:
            stage.open(micro_batches)
        ranks = stage_ranks(self.config, self.axis.degree)
        passed: dict[tuple[int, int], Tensor] = {}  # (stage, micro-batch) -> the hidden states that it starts from
        made: list[tuple[int, Tensor]] = []  # (pp rank that receives, hidden states), in the stages' order
        for time in range(len(micro_batches) + len(ranks) - 1):
            due = [stage for stage in self.stages if 0 <= time - stage.part.stage < len(micro_batches)]
            passed |= self.exchange(made, due, time, ranks)
            made = []
            for stage in due:
                number = time - stage.part.stage
                carried = passed.pop((stage.part.stage, number), None)
                out = stage(torch.empty(0) if carried is None else carried, torch.tensor([number]))
                if stage.part.has_head:
                    continue
                receiver = ranks[stage.part.stage + 1]
                if receiver == self.axis.rank:
                    passed[stage.part.stage + 1, number] = out
                else:
                    made.append((receiver, out.contiguous()))
        return merge_outputs([stage.close() for stage in self.stages], len(micro_batches))

    def exchange(
        self, made: Sequence[tuple[int, Tensor]], due: Sequence[Stage], time: int, ranks: Sequence[int]
    ) -> dict[tuple[int, int], Tensor]:
        """The hidden states that other ranks send to the stages ``due`` at ``time``; sends those in ``made``.

        Keys are (stage, micro-batch). All ranks of pp call it; each sends the bytes of what it has ``made``.
        """
        received = {}
        transfers = [dist.P2POp(dist.isend, out, self.axis.ranks[rank], group=self.axis.group) for rank, out in made]
        for stage in due:
            index = stage.part.stage
            if index > 0 and ranks[index - 1] != self.axis.rank:
                hidden_BSD = torch.empty(self.hidden.shape, dtype=self.hidden.dtype, device=self.device)
                sender = self.axis.ranks[ranks[index - 1]]
                transfers.append(dist.P2POp(dist.irecv, hidden_BSD, sender, group=self.axis.group))
                received[index, time - index] = hidden_BSD
        for work in dist.batch_isend_irecv(transfers) if transfers else []:
            work.wait()
        return received


def ignore(stage: nn.Module) -> None:
    """Does nothing: the ``after_backward`` of steps that were given none."""
