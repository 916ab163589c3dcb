"""DeepSpeed as a ZeRO and mixed-precision engine: gradients accumulated, reduced and applied, and nothing more.

``engine.forward`` and ``engine.backward`` are bypassed: the caller runs the model itself and calls
``Engine.backward`` for each micro-batch. Gradients accumulate and reduce in fp32.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.config import ModelConfig
from modeling.decoder import Decoder, Output
from modeling.init import initial_tensor
from modeling.logical import logical_parameters
from modeling.optimizers.build import build_optimizer, parameter_groups, state_names
from modeling.optimizers.config import OptimizerConfig
from modeling.reference import DTYPES
from parallel.apply import build_part
from parallel.config import ParallelConfig
from parallel.layout import layout_of
from parallel.mesh import Axis, Mesh
from parallel.pipeline.config import PipelineConfig, stage_ranks
from parallel.pipeline.gradients import GradientSums
from parallel.pipeline.run import Pipeline
from parallel.pipeline.stages import MicroBatch, is_second_copy, rank_parts, tied_weight
from parallel.pipeline.tied import add_other_copy
from parallel.sizes import DEFAULT_SIZES, Sizes
from parallel.zero.fragments import Fragment, make_states, owned_fragments
from parallel.zero.groups import EXPERTS, Mpu, experts_are_separate, register_expert_groups
from parallel.zero.norm import Gradient, global_norm, install_norm, zero_gradients

INITIAL_LOSS_SCALE_POWER = 16
TIED = "embed.weight"  # a tied embedding's name, which the head's copy on another stage bears too
LOSS_SCALE_WINDOW = 1000  # steps without overflow before the scale doubles


@dataclass
class StepResult:
    """What one update did, the same on every rank."""

    grad_norm: float  # before clipping; not finite where a gradient was not
    skipped: bool  # an overflow: nothing was updated
    loss_scale: float  # that the step used


class Engine:
    """The model, cast to its precision and wrapped by DeepSpeed, and the fragments of state that this rank owns."""

    def __init__(
        self,
        mesh: Mesh,
        model_config: ModelConfig,
        optimizer_config: OptimizerConfig,
        *,
        parallel: ParallelConfig,
        precision: Literal["fp32", "bf16", "fp16"],
        micro_batch_size: int,
        sizes: Sizes = DEFAULT_SIZES,
    ) -> None:
        self.mesh = mesh
        self.sizes = sizes
        self.zero = zero = parallel.zero
        self.precision = precision
        self.model_config = model_config
        self.layout = layout_of(model_config)
        self.clip_norm = optimizer_config.clip_norm
        self.state_names = state_names(optimizer_config)
        self.parts = rank_parts(model_config, parallel.pipeline, mesh.pp.degree, mesh.pp.rank)
        self.holds_second_copy = model_config.tie_embeddings and is_second_copy(self.parts)
        self.pipeline: Pipeline | None = None
        self.sums: GradientSums | None = None
        self.ends: list[int] = []
        config = deepspeed_config(zero, precision, micro_batch_size, optimizer_config.clip_norm, sizes)
        register_expert_groups(mesh)
        self.model, self.shapes = build_part(mesh, model_config, parallel, DTYPES[precision], config, sizes)
        self.base = build_optimizer(
            self.optimizer_groups(optimizer_config), optimizer_config, fused=mesh.device.type == "cuda"
        )
        self.deepspeed = wrap(self.model, self.base, config, mesh)
        self.optimizer: Any = self.deepspeed.optimizer
        self.uncounted = {id(weight) for name, weight in self.model.named_parameters() if not self.owns(name)}
        self.measured: Tensor | None = None  # this step's norm, loss scale included
        self.before_change: list[Callable[[], None]] = []
        if zero > 0:
            install_norm(self.optimizer, self.scaled_norm)
        if precision == "fp16":
            defer_loss_scale(self.optimizer)
        self.fragments: list[Fragment] = owned_fragments(self.model, self.optimizer, zero, mesh, self.layout, self.owns)
        self.reset_states(0)

    def owns(self, name: str) -> bool:
        """Whether this rank counts and writes its part of a tensor that other ranks of pp or tp hold as well."""
        return self.layout[name].is_owner(self.mesh) and not (name == TIED and self.holds_second_copy)

    def open_pipeline(self, pipeline: PipelineConfig, micro_batch_size: int, seq_len: int) -> None:
        """Makes ``run_pipeline`` and ``evaluate`` work under pp; afterwards ``backward`` is not used."""
        positions = seq_len // (self.mesh.cp.degree * self.mesh.tp.degree)
        self.pipeline = Pipeline(
            self.model,
            self.parts,
            pipeline,
            self.mesh.pp,
            hidden_shape=(micro_batch_size, positions, self.model_config.d_model),
            dtype=DTYPES[self.precision],
            device=self.mesh.device,
        )
        self.sums = GradientSums(self.deepspeed, self.zero, DTYPES[self.precision], self.sizes.bucket)
        self.ends = stage_ranks(pipeline, self.mesh.pp.degree)

    def run_pipeline(self, micro_batches: Sequence[MicroBatch], scale: float) -> list[Output]:
        """All of a step's micro-batches forward and backward through the stages, gradients reduced. All ranks call it.

        ``scale`` is what each summed loss is multiplied by; the contexts weigh the auxiliary losses.
        """
        assert self.pipeline is not None and self.sums is not None
        with self.sums.collect(self.add_tied_gradient):
            return self.pipeline.train(micro_batches, scale, self.sums.after_backward)

    def add_tied_gradient(self) -> None:
        """Where the tied embedding and head lie on two ranks: both get the sum of both gradients."""
        tied = tied_weight(self.model, self.model_config, self.parts, self.mesh.pp.degree)
        if tied is not None and self.sums is not None:
            other = self.ends[0] if self.holds_second_copy else self.ends[-1]
            add_other_copy(self.sums.total(tied), self.mesh.pp, other)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Iterable[Output]:
        """Forward passes only, under torch.no_grad(). All ranks call it with the same number of micro-batches."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(micro_batches)
        return (self.model(batch.tokens_BS, batch.context, batch.targets_BS) for batch in micro_batches)

    def optimizer_groups(self, config: OptimizerConfig) -> list[dict[str, Any]]:
        """The optimizer's groups, experts apart from the rest where DeepSpeed replicates them over other ranks."""
        tensors = logical_parameters(self.model_config)
        named = [(self.layout[name], (weight, tensors[name].weight)) for name, weight in self.model.named_parameters()]
        if not experts_are_separate(self.mesh):
            return parameter_groups([row for _, row in named], config)
        experts = parameter_groups([row for place, row in named if place.is_expert], config)
        dense = parameter_groups([row for place, row in named if not place.is_expert], config)
        marked = [{**group, "name": EXPERTS, "moe": True} for group in experts]
        return [{**group, "name": f"dense_{number}"} for number, group in enumerate(dense)] + marked

    @property
    def loss_scale(self) -> float:
        """What the loss is to be multiplied by before its backward pass."""
        return float(self.optimizer.loss_scale) if self.precision == "fp16" else 1.0

    @property
    def keeps_bf16_accumulators(self) -> bool:
        """Whether DeepSpeed's BF16_Optimizer is at work: ZeRO 1 in bf16, with fp32 accumulators of its own."""
        return self.precision == "bf16" and self.zero == 1

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """One micro-batch's backward pass; ``last`` marks the step's final one. All ranks call it.

        ``loss`` is this rank's part times dp (DeepSpeed averages over dp) times ``loss_scale``.
        """
        engine, optimizer = self.deepspeed, self.optimizer
        engine.enable_backward_allreduce = False
        engine.set_gradient_accumulation_boundary(last if self.zero >= 2 else False)
        if self.keeps_bf16_accumulators:
            optimizer.clear_lp_grads()
        torch.autograd.backward(loss)
        if self.keeps_bf16_accumulators:
            optimizer.update_hp_grads(clear_lp_grads=False)
        if self.zero >= 2:
            engine.allreduce_gradients()
            optimizer.clear_backward_seen_flag()
        elif last:
            engine.set_gradient_accumulation_boundary(True)
            engine.allreduce_gradients(self.sizes.bucket)

    def gradients(self) -> list[Gradient]:
        """What this rank holds of the reduced gradients, with its share of each; after the last backward pass.

        Each counts once over all ranks. They bear the loss scale.
        """
        if self.zero > 0:
            return zero_gradients(self.optimizer, lambda parameter: id(parameter) not in self.uncounted)
        named = self.model.named_parameters()
        shares = {weight: self.owns(name) / self.layout[name].replicas(self.mesh).degree for name, weight in named}
        return [(weight, weight.grad, share) for weight, share in shares.items() if weight.grad is not None]

    def scaled_norm(self) -> Tensor:
        """The gradient norm before clipping, loss scale included: computed once a step. All ranks call it."""
        if self.measured is None:
            parts = [(gradient, share) for _, gradient, share in self.gradients()]
            self.measured = global_norm(parts, self.mesh.device)
        return self.measured

    def measure(self) -> float:
        """The gradient norm before clipping; not finite, on every rank, where any number of any gradient is not.

        To be followed by ``step`` or ``discard``. All ranks call it after the last micro-batch's backward pass.
        """
        return float(self.scaled_norm()) / self.loss_scale

    def announce_change(self) -> None:
        """Calls ``before_change``: the fp32 masters and optimizer states may change from now on.

        Everything that changes them, or hands out views of them, begins with this. Forward and backward passes do not
        change them: a checkpoint's copy of them is taken meanwhile.
        """
        for wait in self.before_change:
            wait()

    def step(self, lr: float) -> StepResult:
        """Clips and applies the gradients. All ranks call it, after the backward pass of the last micro-batch.

        Gradients that are not finite are dropped, as by ``discard``; in fp16 the loss scale then falls.
        """
        self.announce_change()
        for group in self.base.param_groups:
            group["lr"] = lr
        loss_scale, grad_norm = self.loss_scale, self.measure()
        self.deepspeed.set_gradient_accumulation_boundary(True)
        if self.zero == 0:
            skipped = not math.isfinite(grad_norm)
            self.apply_replicated(grad_norm)
        else:
            self.deepspeed.step()
            skipped = bool(self.optimizer.overflow)
        if self.precision == "fp16":
            self.optimizer.update_scale_after_step(skipped)
        self.measured = None
        return StepResult(grad_norm, skipped, loss_scale)

    def apply_replicated(self, norm: float) -> None:
        """Clips and applies the gradients that every rank holds whole (ZeRO 0), or drops them."""
        if not math.isfinite(norm):
            self.deepspeed.zero_grad()
            return
        if self.clip_norm is not None and norm + 1e-6 > self.clip_norm:
            for _, gradient, _ in self.gradients():
                gradient.mul_(self.clip_norm / (norm + 1e-6))
        self.deepspeed.step()

    def discard(self) -> StepResult:
        """Drops the step's gradients: weights, optimizer states and loss scale stay, bit for bit. All ranks call it."""
        self.announce_change()
        result = StepResult(self.measure(), True, self.loss_scale)
        if self.zero == 0:
            self.deepspeed.zero_grad()
        else:
            self.measured = torch.full((), math.nan, device=self.mesh.device)
            self.deepspeed.set_gradient_accumulation_boundary(True)
            self.deepspeed.step()  # which drops what has no finite norm, by its own way for overflows
            assert self.optimizer.overflow
        self.measured = None
        return result

    @property
    def can_lower_loss_scale(self) -> bool:
        """Whether gradients that are not finite may be an overflow, which the loss scaler answers (fp16 only)."""
        return self.precision == "fp16" and self.loss_scale > self.optimizer.loss_scaler.min_scale

    def reset_states(self, step: int, kept: Collection[str] = ()) -> None:
        """Zeroed optimizer states, ``step`` updates old; the caller fills those of ``kept``, which stay as they are."""
        self.announce_change()
        if self.zero == 0:  # a rank updates every weight whole, also one of which its share is nothing
            flats = list(self.model.parameters())
        else:
            flats = list({id(fragment.flat): fragment.flat for fragment in self.fragments}.values())
        make_states(self.base, flats, self.state_names, step, kept)

    def pieces(self, fragment: Fragment) -> dict[str, Tensor]:
        """The fragment's elements of the fp32 weight and of each optimizer state: flat views, writable."""
        self.announce_change()
        state = self.base.state[fragment.flat]
        views = {"weight": fragment.view(fragment.flat.data)}
        return views | {name: fragment.view(state[name]) for name in self.state_names}

    @torch.no_grad()
    def initialize_weights(self, seed: int) -> None:
        """Step 0: each fragment takes its elements of the logical tensor drawn from (seed, name). All ranks call it."""
        self.reset_states(0)
        for fragment in self.fragments:
            logical = initial_tensor(self.model_config, seed, fragment.name, fragment.shape)
            self.pieces(fragment)["weight"].copy_(fragment.cut(logical))
        for name, buffer in self.model.named_buffers():
            buffer.copy_(initial_tensor(self.model_config, seed, name, buffer.shape))
        self.publish_weights()

    @torch.no_grad()
    def publish_weights(self) -> None:
        """Brings the model's weights in line with the fp32 masters. All ranks call it after writing to ``pieces``."""
        match self.zero:
            case 0:  # each rank holds every weight and its states whole, but wrote only its share
                for name, weight in self.model.named_parameters():
                    for whole in (weight, *(self.base.state[weight][state] for state in self.state_names)):
                        gather_replicated(whole, self.layout[name].replicas(self.mesh))
            case 1 | 2:
                self.optimizer.update_lp_params()
            case _:
                self.publish_stage3()

    def publish_stage3(self) -> None:
        """ZeRO 3: masters to the low-precision partitions, and the small parameters that stay whole gathered again."""
        optimizer = self.optimizer
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer.fp16_partitioned_groups_flat[group].data.copy_(optimizer.fp32_partitioned_groups_flat[group].data)
            optimizer._unflatten_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def updates(self) -> int:
        """How many updates the optimizer has made (Adam's step)."""
        states = [state["step"] for state in self.base.state.values() if "step" in state]
        return int(states[0]) if states else 0

    def loss_scaler_state(self) -> dict[str, float]:
        """The dynamic loss scaler's numbers, for a checkpoint; empty unless fp16."""
        if self.precision != "fp16":
            return {}
        scaler = self.optimizer.loss_scaler
        return {name: getattr(scaler, name) for name in LOSS_SCALER_FIELDS}

    def restore_loss_scaler(self, state: dict[str, float]) -> None:
        """Puts back what ``loss_scaler_state`` gave."""
        if self.precision == "fp16":
            for name, value in state.items():
                setattr(self.optimizer.loss_scaler, name, value)


LOSS_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def deepspeed_config(
    zero: int, precision: str, micro_batch_size: int, clip_norm: float | None, sizes: Sizes = DEFAULT_SIZES
) -> dict[str, Any]:
    """DeepSpeed's settings. Each one but its sizes is there because its default is wrong or slow for us."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,  # we scale the loss and mark the boundary ourselves
        "zero_optimization": {
            "stage": zero,
            "overlap_comm": False,  # overlap with late boundaries is silently wrong
            "reduce_bucket_size": sizes.bucket,
            "allgather_bucket_size": sizes.bucket,
            "stage3_param_persistence_threshold": sizes.persistent,
            "stage3_prefetch_bucket_size": sizes.prefetched,
            "stage3_max_live_parameters": sizes.live,
            "stage3_max_reuse_distance": sizes.reused,
            "sub_group_size": sizes.updated,
        },
        "gradient_clipping": clip_norm if zero > 0 and clip_norm is not None else 0.0,
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    if precision != "fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # else gradients accumulate in 16 bits
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        scaling = {"initial_scale_power": INITIAL_LOSS_SCALE_POWER, "loss_scale_window": LOSS_SCALE_WINDOW}
        config["fp16"] = {"enabled": True, "loss_scale": 0, "hysteresis": 1, **scaling}
    return config


def gather_replicated(whole: Tensor, axis: Axis) -> None:
    """Completes a tensor of which each rank of the axis wrote its share (ZeRO 0). All ranks of the axis call it."""
    flat = whole.data.view(-1)
    size = -(-flat.numel() // axis.degree)
    for position, rank in enumerate(axis.ranks):
        start = min(position * size, flat.numel())
        part = flat.narrow(0, start, min(size, flat.numel() - start))
        if part.numel():
            dist.broadcast(part, rank, group=axis.group)


def wrap(model: Decoder, base: torch.optim.Optimizer, config: dict[str, Any], mesh: Mesh) -> Any:
    """The DeepSpeed engine around the model. All ranks call it."""
    import deepspeed

    import parallel.processes.preloaded  # noqa: F401  (quiets DeepSpeed and turns off an operator build, before any use)

    engine, *_ = deepspeed.initialize(
        model=model, optimizer=base, config=config, mpu=Mpu(mesh), dist_init_required=False
    )
    return engine


def defer_loss_scale(optimizer: Any) -> None:
    """Makes the loss scale change after the step that it was used in.

    DeepSpeed moves it before dividing the gradients by it, so in the step where it doubles they come out halved.
    """
    update = optimizer._update_scale
    optimizer._update_scale = MethodType(lambda self, has_overflow=False: None, optimizer)
    optimizer.update_scale_after_step = update
