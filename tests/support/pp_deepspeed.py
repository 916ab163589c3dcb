"""Functions that pipeline tests run in each rank with DeepSpeed's engine: pp x dp, any ZeRO stage."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from launcher.prove.reference import ReferenceTrainer
from modeling.decoder import Decoder, build_decoder
from modeling.dtypes import DTYPES
from modeling.init import fill, initial_tensor
from modeling.logical import logical_tensors
from modeling.optimizers.config import SGDConfig
from pp_runs import SEED, Case, batch_of, make_pipeline, micro_batches


@dataclass
class EngineSeen:
    """One rank's losses, gradient norms and fp32 weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]  # on dp rank 0 only; each logical tensor is on one stage
    copies: dict[str, Tensor]  # the second copy of a tied weight


def engine_rank(case: Case, zero: int, precision: str, clip_norm: float | None) -> EngineSeen:
    """One rank of pp x 2: trains with SGD through DeepSpeed. All ranks call it."""
    from deepspeed.utils import safe_get_full_fp32_param

    from parallel.config import ParallelConfig
    from parallel.layout import layout_of
    from parallel.mesh import close_mesh, open_mesh
    from parallel.pipeline.config import stage_ranks
    from parallel.pipeline.stages import is_second_copy, rank_parts, tied_weight
    from parallel.pipeline.tied import add_other_copy
    from parallel.recompute import apply_recompute
    from parallel.sizes import DEFAULT_SIZES
    from parallel.zero.norm import global_norm
    from parallel.zero.ways import sharding_for
    from parallel.zero.weights import describe_weights

    mesh = open_mesh(SimpleNamespace(pp=case.pp), 60)
    parts = rank_parts(case.model, case.pipeline, case.pp, mesh.pp.rank)
    sharding = sharding_for(ParallelConfig(zero=zero), precision)(
        mesh, precision, case.micro_batch_size, clip_norm, DEFAULT_SIZES
    )
    if precision == "fp16":
        sharding.config["fp16"]["initial_scale_power"] = 10
    model = build_model(case, parts, DTYPES[precision], sharding.adopt)
    tied = tied_weight(model, case.model, parts, case.pp)
    base = torch.optim.SGD(model.parameters(), lr=case.lr)
    second = tied is not None and is_second_copy(parts)
    tensors, layout = logical_tensors(case.model), layout_of(case.model)
    weights = describe_weights(model, tensors, layout, mesh, holds_second_copy=second)
    apply_recompute(model, case.recompute)
    sharding.open(model, base, weights)
    pipeline = make_pipeline(case, mesh, model, parts, DTYPES[precision])
    ends = stage_ranks(case.pipeline, case.pp)

    def finish() -> None:
        if tied is not None and case.fault != "tied gradient not reduced":
            add_other_copy(sharding.total(tied), mesh.pp, ends[-1] if parts[0].has_embedding else ends[0])

    seen = EngineSeen([], [], {}, {})
    for step in range(case.steps):
        scale = sharding.loss_scale.on_losses
        ready, n_targets = micro_batches(batch_of(case, step), scale)
        mine = ready[mesh.dp.rank :: mesh.dp.degree]
        with sharding.collect(finish):
            outputs = pipeline.train(mine, scale / n_targets, sharding.after_backward)
        seen.losses.append(sum(float(output.loss) for output in outputs if output.loss is not None) / n_targets)
        held = sharding.gradients()
        norm = global_norm([(part, weights[weight].is_owner / holders) for weight, part, holders in held], mesh.device)
        assert not sharding.step(norm)
        seen.norms.append(float(norm) / scale * mesh.dp.degree)
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


def build_model(case: Case, parts: list[Any], dtype: torch.dtype, adopt: Callable[[Any, Any], None]) -> Decoder:
    """This rank's decoder with its initial weights, each passed to ``adopt`` with its layout."""
    from parallel.layout import layout_of
    from parallel.pipeline.stages import keep_parts

    layout = layout_of(case.model)
    with torch.device("meta"):
        model = build_decoder(case.model)
    keep_parts(model, parts)

    def value(name: str, shape: torch.Size) -> nn.Parameter:
        parameter = nn.Parameter(initial_tensor(case.model, SEED, name, shape).to(dtype))
        adopt(parameter, layout[name])
        return parameter

    fill(model, value, "cpu")
    for name, buffer in model.named_buffers():
        buffer.copy_(initial_tensor(case.model, SEED, name, buffer.shape))
    return model


def engine_errors(case: Case, zero: int, precision: str = "fp32", clip_norm: float | None = None) -> dict[str, float]:
    """The largest relative errors (absolute for weights) of the case on pp x 2 processes against one plain process."""
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
    norms = results[0].norms
    found["norm"] = max(abs(a - b.grad_norm) / b.grad_norm for a, b in zip(norms, steps, strict=True))
    return found
