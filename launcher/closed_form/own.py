"""A Roundtable config as a job of the closed forms: all its dims are stated, so none is inferred."""

from typing import Any, assert_never

from launcher.closed_form.architecture import Architecture, Latent
from launcher.closed_form.budget import modes_of, way_of
from launcher.closed_form.gpus import Gpu
from launcher.closed_form.memory import FULL, HALF
from launcher.closed_form.own_memory import (
    Ours,
    Repeats,
    layers_by_position,
    layers_of_stages,
    mean_matrix_flops,
    mean_states,
    most_by_position,
    sent_by_position,
    update_bytes,
)
from launcher.closed_form.rows import Job, Schedule
from launcher.closed_form.systems import System
from launcher.config.tree import RunConfig
from modeling.config import ModelConfig
from modeling.kernels.attention import ROW_SCORES
from parallel.mesh import Degrees
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB, PipelineConfig, chunks, stage_ranks
from parallel.sizes import DEFAULT_SIZES

AT_ONCE = 6  # tensors of a piece's attention scores in memory at once


def job_of_config(config: RunConfig, world_size: int, gpu: Gpu, per_node: int) -> Job:
    """The job that `train` would run on ``world_size`` GPUs, planned without overlap and without compiled kernels."""
    parallel, train, degrees = config.parallel, config.train, Degrees.of(config.parallel, world_size)
    model = config.model
    schedule = parallel.pipeline
    return Job(
        architecture=architecture_of_config(model),
        system=System(
            flash=not takes_formula(model) and not takes_sloping_mask(config),
            overlaps=False,
            fused=False,
            fused_sums=False,
            fp32_sums=True,
            buffer_elements=2.0 * DEFAULT_SIZES.bucket,
            dispatch="all-to-all",
            n_further=model.mtp.depth if model.mtp is not None else 0,
        ),
        gpu=gpu.hardware.name,
        n_gpus=world_size,
        per_node=per_node,
        interconnect="",
        dp=degrees.dp,
        tp=degrees.tp,
        pp=degrees.pp,
        vpp=chunks(schedule) if degrees.pp > 1 else 1,
        cp=degrees.cp,
        ep=degrees.ep,
        zero=parallel.zero,
        shard=degrees.dp * degrees.cp,
        recompute="elementwise" if train.recompute == "selective" else train.recompute,
        precision="bf16" if train.precision == "fp16" else train.precision,
        schedule=nearest_schedule(schedule),
        seq_len=config.data.seq_len,
        global_batch_size=train.batches.sizes[-1],
        micro_batch_size=train.micro_batch_size,
        scaled_fp16=train.precision == "fp16",
        is_own_fp8=train.precision == "fp8",
        keeps_cut_weights=train.fp8_keep_weights,
        ours=ours_of(config, world_size),
    )


def nearest_schedule(pipeline: PipelineConfig) -> Schedule:
    """The schedule of the closed forms whose idle time and memory are closest to this pipeline's."""
    match pipeline:
        case OneFOneB():
            return "1f1b"
        case Interleaved():
            return "interleaved"
        case ZBV() | DualPipeV():
            return "zb-1p"
        case _:
            assert_never(pipeline)


def micro_batches_of(config: RunConfig, world_size: int) -> int:
    """Micro-batches of a rank in a step of the largest batch size that the run has."""
    train, dp = config.train, Degrees.of(config.parallel, world_size).dp
    return max(1, train.batches.sizes[-1] // (dp * train.micro_batch_size))


def ours_of(config: RunConfig, world_size: int) -> Ours:
    """What the closed forms need of a config besides its dims and its layout."""
    model, parallel, train = config.model, config.parallel, config.train
    modes, pipeline, pp = modes_of(config, world_size), parallel.pipeline, parallel.pp
    n_micro_batches = micro_batches_of(config, world_size)
    return Ours(
        pipeline=pipeline,
        element=4 if train.stored == "fp32" else 2,
        states=mean_states(model, config.optimizer),
        update=update_bytes(model, config.optimizer, parallel, world_size // pp),
        matrix_flops=mean_matrix_flops(model, config.optimizer, parallel.tp),
        zero=parallel.zero,
        pp=pp,
        sums_in_place=parallel.zero == 1 and (train.stored == "bf16" or parallel.grad_reduce != "step"),
        scatters=parallel.zero == 1 and parallel.grad_reduce == "micro_batch",
        held=most_by_position(model, pipeline, pp, modes, way_of(config), n_micro_batches),
        again=Repeats.of(modes, layers_of_stages(model, pipeline, pp)),
        layers=layers_by_position(model, pipeline, pp),
        updates_on_host=parallel.offload_optimizer,
        sent=sent_by_position(model, pipeline, pp, modes, way_of(config)),
        head_at=stage_ranks(pipeline, pp)[-1],
        scores=score_bytes(config),
    )


def takes_formula(model: ModelConfig) -> bool:
    """Whether no fused kernel can compute the model's attention, so that its scores are written to memory."""
    is_sloped_with_sinks = model.positions == "alibi" and model.sinks
    return model.score_cap is not None or model.positions == "t5" or model.attention_dropout > 0 or is_sloped_with_sinks


def takes_sloping_mask(config: RunConfig) -> bool:
    """Whether ALiBi needs a mask over all pairs: in fp32 and in a ring; else channels of queries and keys encode it."""
    is_ring = config.parallel.cp > 1 and config.parallel.cp_attention == "ring"
    return config.model.positions == "alibi" and (is_ring or config.train.precision == "fp32")


def score_bytes(config: RunConfig) -> float:
    """Bytes of attention scores in memory at once, of a piece of rows; or of ALiBi's mask over all pairs; else 0."""
    model, parallel, train = config.model, config.parallel, config.train
    n_heads = model.n_heads / (parallel.tp * parallel.cp)
    pairs = train.micro_batch_size * n_heads * config.data.seq_len**2
    if takes_formula(model):
        return AT_ONCE * FULL * min(pairs, ROW_SCORES)
    return (FULL + HALF) * pairs if takes_sloping_mask(config) else 0.0


def architecture_of_config(model: ModelConfig) -> Architecture:
    """The dims of the config's decoder."""
    moe, mla = model.moe, model.mla
    windows = [model.window_of(layer) for layer in range(model.n_layers)]
    latent = None
    if mla is not None:
        latent = Latent(
            query_rank=mla.q_lora_rank,
            kv_rank=mla.kv_lora_rank,
            d_nope=mla.d_nope,
            d_rope=mla.d_rope,
            d_value=mla.d_v,
        )
    experts: dict[str, Any] = {}
    if moe is not None:
        n_dense = sum(not model.is_moe_layer(layer) for layer in range(model.n_layers))
        experts = {
            "n_experts": moe.n_experts,
            "top_k": moe.top_k,
            "expert_d_ff": moe.d_ff,
            "n_shared_experts": moe.shared_width / moe.d_ff,
            "n_dense_layers": n_dense,
        }
    return Architecture(
        n_layers=model.n_layers,
        d_model=model.d_model,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        d_head=model.d_head or model.d_model // model.n_heads,
        d_ff=model.d_ff,
        ff_matrices=3 if model.ff_gated else 2,
        vocab_size=model.vocab_size,
        tied=model.tie_embeddings,
        latent=latent,
        n_gates=model.n_gates,
        linear=model.linear_attention,
        linear_share=sum(map(model.is_linear_layer, range(model.n_layers))) / model.n_layers,
        window=model.sliding_window,
        window_share=sum(each is not None for each in windows) / model.n_layers,
        **experts,
    )
