"""The training engine: a model, its optimizer and its gradients under ZeRO and mixed precision, by DeepSpeed.

DeepSpeed accumulates, reduces and applies gradients, and does nothing more: its own ``forward`` and ``backward`` are
not used. The caller runs the model and calls ``Engine.backward`` for each micro-batch. Gradients accumulate and reduce
in fp32.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modeling.config import ModelConfig
from modeling.decoder import Output
from modeling.dtypes import DTYPES
from modeling.init import initial_box, initial_tensor
from modeling.kernels.fuse import Fuse, plainly
from modeling.kernels.products import AS_THEY_ARE, Products
from modeling.logical import logical_tensors
from modeling.mup import widths_of
from modeling.optimizers.config import OptimizerConfig
from modeling.precision_config import Precision, stored_as
from parallel.apply import build_part
from parallel.batch import MicroBatch
from parallel.collectives import sum_together
from parallel.config import ParallelConfig
from parallel.layout import layout_of
from parallel.mesh import Mesh
from parallel.offload import Copies
from parallel.pipeline.config import PipelineConfig, stage_ranks
from parallel.pipeline.run import Pipeline
from parallel.pipeline.stages import is_second_copy, rank_parts, stage_weights, tied_weight
from parallel.pipeline.tied import add_other_copy
from parallel.recompute import Modes, Recompute
from parallel.sizes import DEFAULT_SIZES, Sizes
from parallel.zero.accumulation import accumulation_by
from parallel.zero.fragments import Fragment, make_states, owned_fragments
from parallel.zero.groups import optimizer_groups
from parallel.zero.norm import global_norm
from parallel.zero.ways import sharding_for
from parallel.zero.weights import describe_weights

Gradient = tuple[nn.Parameter, Tensor, float]  # a weight, what this rank holds of its gradient, and its share


@dataclass
class StepResult:
    """The result of one update, the same on every rank."""

    grad_norm: float  # before clipping, without the loss scale; not finite if any gradient was not
    skipped: bool  # whether nothing was updated, because gradients were not finite or were discarded
    loss_scale: float  # the one that this step used


class Engine:
    """This rank's part of the model in its precision, with its share of gradients, masters and optimizer states.

    A step is ``backward`` for each micro-batch, or under pp ``run_pipeline``; then ``step`` or ``discard``. All ranks
    call all of them. ``fragments`` says which elements of which logical tensor this rank's fp32 masters hold.
    """

    def __init__(
        self,
        mesh: Mesh,
        model_config: ModelConfig,
        optimizer_config: OptimizerConfig,
        *,
        parallel: ParallelConfig,
        precision: Precision,
        micro_batch_size: int,
        sizes: Sizes = DEFAULT_SIZES,
        recompute: Recompute | Modes = "none",
        copies: Copies | None = None,
        fuse: Fuse = plainly,
        products: Products = AS_THEY_ARE,
    ) -> None:
        """Builds the model's part with all weights zero. All ranks call it; ``initialize_weights`` or a load follows.

        ``copies``: how activations that layers save go to the host; None: they stay on the device. ``fuse``: how chains
        of elementwise work are computed. ``products``: how layers multiply by their weights.
        """
        self.mesh = mesh
        self.sizes = sizes
        self.fuse = fuse
        self.products = products
        self.zero = parallel.zero  # for records only; the code that depends on it is in the sharding
        self.precision: Precision = precision  # for records; what depends on it is in the dtype and the products
        self.model_config = model_config
        self.layout = layout_of(model_config)
        self.rule = optimizer_config
        self.parts = rank_parts(model_config, parallel.pipeline, mesh.pp.degree, mesh.pp.rank)
        self.holds_second_copy = model_config.embeds_at_end and is_second_copy(self.parts)
        self.pipeline: Pipeline | None = None
        self.ends: list[int] = []
        self.measured: Tensor | None = None  # this step's norm, with ``gradient_scale``
        self.before_change: list[Callable[[], None]] = []
        stored = stored_as(precision)
        make_sharding = sharding_for(parallel, stored)
        self.sharding = make_sharding(
            mesh, stored, micro_batch_size, optimizer_config.clip_norm, sizes, accumulation_by(fuse)
        )
        adopt, dtype = self.sharding.adopt, DTYPES[stored]
        held = (mesh, model_config, parallel, dtype, adopt, sizes)
        stay = self.sharding.weights_stay
        self.model = build_part(*held, recompute, fuse, products, weights_stay=stay, copies=copies)
        self.weights = describe_weights(
            self.model, logical_tensors(model_config), self.layout, mesh, holds_second_copy=self.holds_second_copy
        )
        groups = optimizer_groups(self.weights.values(), mesh, optimizer_config, widths_of(model_config))
        tied = tied_weight(self.model, model_config, self.parts, mesh.pp.degree)
        groups = self.sharding.cut_groups(groups, stage_weights(self.model, self.parts), tied)
        self.base = optimizer_config.build(groups, fused=mesh.device.type == "cuda" or optimizer_config.fused_on_cpu)
        self.sharding.open(self.model, self.base, self.weights)
        matrices = self.sharding.matrices(optimizer_config)
        for group in self.base.param_groups:
            group["matrices"] = matrices
        self.fragments: list[Fragment] = owned_fragments(self.weights.values(), self.sharding.share_of)
        self.reset_states(0)

    def open_pipeline(self, pipeline: PipelineConfig, micro_batch_size: int, seq_len: int) -> None:
        """Attaches the pipeline schedule. Under pp, call ``run_pipeline`` and ``evaluate`` after it.

        ``backward`` must not be called then. No communication.
        """
        positions = seq_len // (self.mesh.cp.degree * self.mesh.tp.degree)
        self.pipeline = Pipeline(
            self.model,
            self.parts,
            pipeline,
            self.mesh.pp,
            hidden_shape=(micro_batch_size, positions, self.model_config.d_model),
            dtype=DTYPES[stored_as(self.precision)],
            device=self.mesh.device,
            neighbours=self.mesh.neighbours,
        )
        self.ends = stage_ranks(pipeline, self.mesh.pp.degree)

    def run_pipeline(self, micro_batches: Sequence[MicroBatch], weight: float) -> list[Output]:
        """One Output for each of a step's micro-batches, after their forward and backward passes through all stages.

        Afterwards the gradients are reduced. ``weight``: by what each summed loss is multiplied in the total; the
        contexts weigh the auxiliary losses. All ranks call it.
        """
        with self.sharding.collect(self.add_tied_gradient):
            outputs = self.run_passes(micro_batches, weight)
        self.add_over_tp()
        return outputs

    def run_passes(self, micro_batches: Sequence[MicroBatch], weight: float) -> list[Output]:
        """The forward and backward passes of ``run_pipeline``, before gradients are reduced at the step's end."""
        assert self.pipeline is not None
        return self.pipeline.train(micro_batches, weight * self.loss_factor, self.sharding.after_backward)

    def add_tied_gradient(self) -> None:
        """Gives both copies of the embedding the sum of both gradients, if the ranks of both pipeline ends hold one."""
        tied = tied_weight(self.model, self.model_config, self.parts, self.mesh.pp.degree)
        if tied is not None:
            other = self.ends[0] if self.holds_second_copy else self.ends[-1]
            add_other_copy(self.sharding.total(tied), self.mesh.pp, other)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Iterable[Output]:
        """One Output for each micro-batch, from forward passes alone; call it under torch.no_grad().

        All ranks call it with the same number of micro-batches. Without a pipeline the passes run one by one, as the
        result is iterated.
        """
        if self.pipeline is not None:
            return self.pipeline.evaluate(micro_batches)
        return (self.model(batch.tokens_BS, batch.context, batch.targets_BS) for batch in micro_batches)

    @property
    def loss_scale(self) -> float:
        """fp16's factor on the loss; 1 in other precisions."""
        return self.sharding.loss_scale.value

    @property
    def gradient_scale(self) -> float:
        """The factor that gradients include until they are applied: fp16's loss scale over the replicas, else 1."""
        return self.sharding.loss_scale.in_gradients

    @property
    def loss_factor(self) -> float:
        """The factor on each term of the total loss before its backward pass; ``backward`` multiplies the loss by it.

        The auxiliary losses' weights in the contexts, whose gradients are injected into that pass, must be multiplied
        by it too. It is the number of ranks that replicate dense weights, which undoes DeepSpeed's averaging over them:
        gradients are those of sums over all ranks. In fp16 it is the loss scale, and the update undoes the averaging.
        """
        return self.sharding.loss_scale.on_losses

    @property
    def needs_equal_graphs(self) -> bool:
        """Whether all ranks must run the same operations that save tensors for the backward pass.

        This is so where backward passes communicate, in the order of the autograd graph; recomputation, too, begins at
        the operation that saved a tensor first.
        """
        return self.sharding.needs_equal_graphs

    def backward(self, loss: Tensor, weight: float, *, last: bool) -> None:
        """One micro-batch's backward pass; ``last`` marks the step's final one. All ranks call it.

        ``loss`` is the sum over this rank's targets; ``weight`` multiplies it in the total, 1 / targets of the batch
        for a mean. After the last pass the gradients are reduced: those of the total over all micro-batches and ranks.
        """
        self.sharding.backward(loss * (weight * self.loss_factor), last=last)
        if last:
            self.add_over_tp()

    def add_over_tp(self) -> None:
        """Sums over tp the gradients of weights that each rank of tp holds whole. All ranks call it.

        Before: a summand on each rank of tp. After: the same sums on all. It is called once a step, after the reduction
        over the replicas, by which a gradient is sharded alike on every rank of tp.
        """
        if self.mesh.tp.degree > 1:
            held = self.sharding.gradients()
            whole = [part for parameter, part, _ in held if self.weights[parameter].place.is_summed_over_tp]
            sum_together(whole, self.mesh.tp, self.mesh.device)

    def gradients(self) -> list[Gradient]:
        """The weights with this rank's parts of their reduced gradients and its share of each, after the last backward.

        The share is 1 / the ranks that hold the same part, or 0 where this rank does not count it, so that over all
        ranks each gradient counts once. They include ``gradient_scale``; ``step`` applies what is written into them.
        """
        held = self.sharding.gradients()
        return [(weight, part, self.weights[weight].is_owner / holders) for weight, part, holders in held]

    def flat_gradient(self, flat: Tensor) -> Tensor:
        """The reduced gradient of a fragment's ``flat``, in the same layout: fp32, ``gradient_scale`` included."""
        return self.sharding.flat_gradient(flat)

    def kept_weights(self) -> dict[str, Tensor]:
        """The part of each weight that this rank keeps between steps, in the model's dtype, by name."""
        return {weight.name: self.sharding.kept(parameter) for parameter, weight in self.weights.items()}

    def scaled_norm(self) -> Tensor:
        """The gradient norm before clipping, with ``gradient_scale``, computed once a step. All ranks call it.

        It is an fp32 scalar on the host, where DeepSpeed reads it. A GPU multiplies by a scalar on the device in a
        kernel that is not vectorized: clipping took 27 ms of a step of Llama 3 8B on an H200, thrice what its bytes
        take.
        """
        if self.measured is None:
            parts = [(gradient, share) for _, gradient, share in self.gradients()]
            self.measured = global_norm(parts, self.mesh.device, self.fuse).cpu()
        return self.measured

    def measure(self) -> float:
        """The gradient norm before clipping, without the loss scale; on all ranks not finite if any gradient is not.

        All ranks call it after the last micro-batch's backward pass; ``step`` or ``discard`` must follow.
        """
        return float(self.scaled_norm()) / self.gradient_scale

    def announce_change(self) -> None:
        """Calls the functions in ``before_change``, which return when the masters and optimizer states may change.

        Every method that changes them, or returns views of them, calls this first. Forward and backward passes do not
        change them, so a checkpoint's copy of them is taken during these.
        """
        for wait in self.before_change:
            wait()

    def step(self, lr: float) -> StepResult:
        """Clips and applies the gradients. All ranks call it, after the backward pass of the last micro-batch.

        Gradients that are not finite are dropped, and nothing is updated; in fp16 the loss scale is then lowered.
        """
        self.announce_change()
        for group in self.base.param_groups:
            group["lr"] = lr * group["lr_scale"]
        loss_scale, grad_norm = self.loss_scale, self.measure()
        skipped = self.sharding.step(self.scaled_norm())
        self.products.weights_changed()
        self.measured = None
        return StepResult(grad_norm, skipped, loss_scale)

    def discard(self) -> StepResult:
        """Drops the step's gradients: weights, optimizer states and loss scale stay, bit for bit. All ranks call it."""
        self.announce_change()
        result = StepResult(self.measure(), True, self.loss_scale)
        self.sharding.drop()
        self.measured = None
        return result

    @property
    def can_lower_loss_scale(self) -> bool:
        """Whether gradients that are not finite may be an fp16 overflow that a lower loss scale avoids (fp16 only)."""
        return self.sharding.loss_scale.can_fall

    def reset_states(self, step: int, kept: Collection[str] = ()) -> None:
        """Zeroes the optimizer states and sets their update count to ``step``.

        States of the kinds in ``kept`` are left as they are, for the caller to fill.
        """
        self.announce_change()
        make_states(self.base, self.sharding.updated(), self.rule, step, kept)

    def pieces(self, fragment: Fragment) -> dict[str, Tensor]:
        """Writable flat views of the fragment's elements: of the fp32 weight ("weight") and of each optimizer state."""
        self.announce_change()
        state = self.base.state[fragment.flat]
        views = {"weight": fragment.view(fragment.flat.data)}
        return views | {name: fragment.view(state[name]) for name in self.rule.states_of(fragment.weight)}

    @torch.no_grad()
    def initialize_weights(self, seed: int) -> None:
        """Fills masters, buffers and weights as before the first update, with its loss scale. All ranks call it.

        Each fragment gets its elements of the logical tensor drawn from (seed, name), so that the weights are the same
        under every layout. Experts that this rank does not hold are not drawn.
        """
        self.reset_states(0)
        self.restore_loss_scaler({})
        for fragment in self.fragments:
            around = fragment.around()
            rows = initial_box(self.model_config, seed, fragment.name, around.start, around.shape, fragment.shape)
            self.pieces(fragment)["weight"].copy_(fragment.cut(rows))
        for name, buffer in self.model.named_buffers():
            buffer.copy_(initial_tensor(self.model_config, seed, name, buffer.shape))
        self.publish_weights()

    @torch.no_grad()
    def publish_weights(self) -> None:
        """Copies the fp32 masters into the model's weights. All ranks call it after writing to ``pieces``."""
        self.sharding.publish(self.rule)
        self.products.weights_changed()

    def updates(self) -> int:
        """The number of updates that the optimizer has made, if its rule counts them (Adam's step); else 0."""
        if not self.rule.counts_updates:
            return 0
        return int(next(iter(self.base.state.values()))["step"])

    def loss_scale_times(self, factor: float) -> AbstractContextManager[None]:
        """A context in which fp16's loss scale is multiplied by ``factor``, which must be the same on all ranks."""
        return self.sharding.loss_scale.times(factor)

    def loss_scaler_state(self) -> dict[str, float]:
        """The dynamic loss scaler's numbers, for a checkpoint; empty unless fp16."""
        return self.sharding.loss_scale.state()

    def restore_loss_scaler(self, state: dict[str, float]) -> None:
        """Sets the loss scaler's numbers to those that ``loss_scaler_state`` returned.

        An empty state, as one saved in another precision than fp16, sets those before the first update.
        """
        self.sharding.loss_scale.restore(state)
