"""Rules of `train.activation_gib`: it alone says what layers recompute, and the least that they hold fits into it."""

from collections.abc import Iterator

from launcher.config.tree import RunConfig, TrainConfig


def check_one_way(train: TrainConfig) -> Iterator[str]:
    """Recomputation is chosen for all layers alike, or for each of them."""
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
    """Every rank can keep within the budget. ``config`` breaks no other rule."""
    gib, parallel = config.train.activation_gib, config.parallel
    if gib is None:
        return
    from launcher.closed_form.budget import least_gib  # with torch, which a look at a usual config does without

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
