"""What pipeline tests run in each rank with DeepSpeed's engine: pp x dp, any ZeRO stage."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from modeling.decoder import Decoder, build_decoder
from modeling.init import fill, initial_tensor
from modeling.optimizers.config import SGDConfig
from modeling.reference import DTYPES, ReferenceTrainer
from pp_runs import SEED, Case, batch_of, make_pipeline, micro_batches


@dataclass
class EngineSeen:
    """One rank's losses, gradient norms and fp32 weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]  # of the first rank of dp; each logical tensor is on one stage
    copies: dict[str, Tensor]  # the tied weight's second copy


def engine_rank(case: Case, zero: int, precision: str, clip_norm: float | None) -> EngineSeen:
    """One rank of pp x 2: steps of SGD through DeepSpeed."""
    import deepspeed
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    from deepspeed.utils import safe_get_full_fp32_param

    import parallel.processes.preloaded  # noqa: F401
    from parallel.mesh import close_mesh, open_mesh
    from parallel.pipeline.config import splits_backward, stage_ranks
    from parallel.pipeline.gradients import GradientSums
    from parallel.pipeline.stages import is_second_copy, rank_parts, tied_weight
    from parallel.pipeline.tied import add_other_copy
    from parallel.recompute import apply_recompute
    from parallel.zero.engine import deepspeed_config
    from parallel.zero.groups import Mpu

    coordinator.assert_ints_same_as_other_ranks = lambda *_, **__: None  # it broadcasts over the world and deadlocks
    mesh = open_mesh(SimpleNamespace(pp=case.pp), 60)
    parts = rank_parts(case.model, case.pipeline, case.pp, mesh.pp.rank)
    config = deepspeed_config(zero, precision, case.micro_batch_size, clip_norm)
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 10
    model = build_model(case, parts, mesh, DTYPES[precision], config if zero == 3 else None)
    tied = tied_weight(model, case.model, parts, case.pp)
    if tied is not None:
        tied.ds_pipe_replicated = is_second_copy(parts)  # DeepSpeed's own norm leaves it out then
    base = torch.optim.SGD(model.parameters(), lr=case.lr)
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=base, config=config, mpu=Mpu(mesh), dist_init_required=False
    )
    apply_recompute(model, case.recompute, splits_backward=splits_backward(case.pipeline))
    pipeline = make_pipeline(case, mesh, model, parts, DTYPES[precision])
    sums = GradientSums(engine, zero, DTYPES[precision])
    ends = stage_ranks(case.pipeline, case.pp)

    def finish() -> None:
        if tied is not None and case.fault != "tied gradient not reduced":
            add_other_copy(sums.total(tied), mesh.pp, ends[-1] if parts[0].has_embedding else ends[0])

    seen = EngineSeen([], [], {}, {})
    for step in range(case.steps):
        scale = mesh.dp.degree * (float(optimizer.loss_scale) if precision == "fp16" else 1.0)
        ready, n_targets = micro_batches(batch_of(case, step), scale)
        mine = ready[mesh.dp.rank :: mesh.dp.degree]
        with sums.collect(finish):
            outputs = pipeline.train(mine, scale / n_targets, sums.after_backward)
        seen.losses.append(sum(float(output.loss) for output in outputs if output.loss is not None) / n_targets)
        engine.step()
        seen.norms.append(float(engine.get_global_grad_norm()) if zero > 0 else 0.0)
    whole = {
        name: weight.detach().clone() if zero == 0 else safe_get_full_fp32_param(weight)
        for name, weight in model.named_parameters()
    }
    if tied is not None and is_second_copy(parts):
        seen.copies, whole = (
            {"embed.weight": whole["embed.weight"]},
            {n: w for n, w in whole.items() if n != "embed.weight"},
        )
    seen.weights = whole if mesh.dp.rank == 0 else {}
    close_mesh()
    return seen


def build_model(case: Case, parts: list[Any], mesh: Any, dtype: torch.dtype, zero3: dict[str, Any] | None) -> Decoder:
    """This rank's decoder with its weights at step 0, partitioned under ZeRO 3."""
    import deepspeed

    from parallel.pipeline.stages import keep_parts

    with torch.device("meta"):
        model = build_decoder(case.model)
    keep_parts(model, parts)
    partition: Any = None
    if zero3 is not None:
        partition = deepspeed.zero.Init(config_dict_or_path=zero3, dtype=dtype, data_parallel_group=mesh.replicas.group)

    def value(name: str, shape: torch.Size) -> nn.Parameter:
        parameter = nn.Parameter(initial_tensor(case.model, SEED, name, shape).to(dtype))
        if partition is not None:
            partition._convert_to_zero_parameters([parameter])
        return parameter

    fill(model, value, "cpu")
    for name, buffer in model.named_buffers():
        buffer.copy_(initial_tensor(case.model, SEED, name, buffer.shape))
    return model


def engine_errors(case: Case, zero: int, precision: str = "fp32", clip_norm: float | None = None) -> dict[str, float]:
    """Runs the case on pp x 2 processes and on one plain process: largest relative errors (weights: absolute)."""
    from parallel.processes.start import run_ranks

    results: list[EngineSeen] = run_ranks(
        engine_rank, 2 * case.pp, case, zero, precision, clip_norm, timeout_seconds=200, threads=1
    )
    trainer = ReferenceTrainer(
        case.model,
        SGDConfig(lr=case.lr, clip_norm=clip_norm),
        seed=SEED,
        precision=precision,
        loss_scale=1024.0 if precision == "fp16" else 1.0,
    )
    steps = [trainer.step(batch_of(case, step), case.lr) for step in range(case.steps)]
    losses = [sum(result.losses[step] for result in results) for step in range(case.steps)]
    weights = {name: weight for result in results for name, weight in result.weights.items()}
    assert weights.keys() == trainer.masters.keys(), weights.keys() ^ trainer.masters.keys()
    found = {
        "loss": max(abs(a - b.loss) / b.loss for a, b in zip(losses, steps, strict=True)),
        "weight": 0.0,
        "norm": 0.0,
    }
    for name, weight in weights.items():
        found["weight"] = max(found["weight"], float((weight - trainer.masters[name].detach()).abs().max()))
    copies = [result.copies["embed.weight"] for result in results if result.copies]
    found["copies"] = max((float((copy - weights["embed.weight"]).abs().max()) for copy in copies), default=0.0)
    if zero in (1, 2):  # ZeRO 3's own norm is that of one stage: parallel.zero.norm replaces it
        norms = results[0].norms
        found["norm"] = max(abs(a - b.grad_norm) / b.grad_norm for a, b in zip(norms, steps, strict=True))
    return found
