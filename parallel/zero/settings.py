"""The configuration that is passed to DeepSpeed."""

from typing import Any

from parallel.sizes import DEFAULT_SIZES, Sizes

INITIAL_LOSS_SCALE_POWER = 16
LOSS_SCALE_WINDOW = 1000  # steps without overflow before the scale doubles


def deepspeed_config(
    zero: int,
    precision: str,
    micro_batch_size: int,
    clip_norm: float | None,
    sizes: Sizes = DEFAULT_SIZES,
    accumulates: str = "fp32",
    *,
    offload: bool = False,
    pin_memory: bool = False,
) -> dict[str, Any]:
    """DeepSpeed's configuration. Every setting but the sizes is there because its default would be wrong or slow here.

    ``zero``: the stage. ``precision``: fp32, bf16 or fp16. ``clip_norm``: the norm by which DeepSpeed clips; None: it
    does not clip. ``accumulates``: the dtype of DeepSpeed's sums of gradients. ``offload``: the optimizer is on the
    host, in page-locked memory with ``pin_memory``.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,  # Roundtable scales the loss and marks the last micro-batch itself
        "zero_optimization": {
            "stage": zero,
            "overlap_comm": False,  # silently wrong where the last micro-batch is marked late
            "reduce_bucket_size": sizes.bucket,
            "allgather_bucket_size": sizes.bucket,
            "stage3_param_persistence_threshold": sizes.persistent,
            "stage3_prefetch_bucket_size": sizes.prefetched,
            "stage3_max_live_parameters": sizes.live,
            "stage3_max_reuse_distance": sizes.reused,
            "sub_group_size": sizes.updated,
        },
        "gradient_clipping": clip_norm if clip_norm is not None else 0.0,
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": pin_memory}
        config["zero_force_ds_cpu_optimizer"] = False  # else torch's own optimizer is refused
    if precision != "fp32":
        config["data_types"] = {"grad_accum_dtype": accumulates}  # by default DeepSpeed sums in 16 bits
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        scaling = {"initial_scale_power": INITIAL_LOSS_SCALE_POWER, "loss_scale_window": LOSS_SCALE_WINDOW}
        config["fp16"] = {"enabled": True, "loss_scale": 0, "hysteresis": 1, **scaling}
    return config
