"""Rules of `train.activation_gib`: no other option chooses the recomputation, and every rank can keep within it."""

from collections.abc import Iterator

from launcher.config.tree import RunConfig, TrainConfig


def check_one_way(train: TrainConfig) -> Iterator[str]:
    """One line for each option that excludes `train.activation_gib`: offloaded activations, and `train.recompute`."""
    if train.activation_gib is not None and train.offload_activations:
        yield (
            f"train.activation_gib={train.activation_gib:g} must be null where train.offload_activations=true (a "
            "budget is of activations that stay on the device); try train.activation_gib=null, or "
            "train.offload_activations=false"
        )
    if train.activation_gib is not None and train.recompute != "none":
        yield (
            f"train.recompute={train.recompute} must be none where train.activation_gib={train.activation_gib:g} "
            "(which chooses what each layer recomputes); try train.recompute=none, or train.activation_gib=null"
        )


def check_budget(config: RunConfig, world_size: int) -> Iterator[str]:
    """A line where a rank exceeds the budget even with full recomputation. ``config`` must break no other rule."""
    gib, parallel = config.train.activation_gib, config.parallel
    if gib is None:
        return
    from launcher.closed_form.budget import least_gib  # imports torch, which checking a usual config does not need

    least, position = least_gib(config, world_size)
    if least > gib:
        where = f", which the ranks of pipeline position {position} of parallel.pp={parallel.pp} hold" * (
            parallel.pp > 1
        )
        yield (
            f"train.activation_gib={gib:g} must be at least {least:g}{where} with full recomputation at "
            f"train.micro_batch_size={config.train.micro_batch_size} (what each layer is given, for the micro-batches "
            f"in flight, and one layer computed again); try {least:g}"
        )
