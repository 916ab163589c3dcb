"""Counts how often DeepSpeed's ZeRO 3 really gathers each weight in one training step."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from launcher.config.tree import RunConfig
from parallel.sizes import Sizes

PRELOAD = ("launcher.training.loop",)
WARM_UP = 3  # steps; ZeRO 3 learns the order of the modules in its first pass, and decides what to drop in its second


def count_gathers(config: RunConfig, cases: Sequence[Sizes]) -> list[dict[str, int]]:
    """For each of the sizes, how often each weight is gathered in one step, prefetching included. All ranks call it."""
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(config.parallel, 240)
    found = [count_step(config, mesh, sizes) for sizes in cases]
    close_mesh()
    return found


def count_step(config: RunConfig, mesh: Any, sizes: Sizes) -> dict[str, int]:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    from data.dataset import open_dataset
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState

    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    engine = build_engine(config, mesh, sizes)
    engine.initialize_weights(config.seed)
    state = TrainState()
    for _ in range(WARM_UP):
        run_step(config, engine, dataset, state)
    names = {id(weight): name for name, weight in engine.model.named_parameters()}
    counts, attribute = Counter[str](), "_PartitionedParameterCoordinator__all_gather_params_"
    gather = getattr(PartitionedParameterCoordinator, attribute)

    def counted(self: Any, weights: Any, *rest: Any, **options: Any) -> Any:
        missing = [weight for weight in weights if weight.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        counts.update(names[id(weight)] for weight in missing)
        return gather(self, weights, *rest, **options)

    setattr(PartitionedParameterCoordinator, attribute, counted)
    try:
        run_step(config, engine, dataset, state)
    finally:
        setattr(PartitionedParameterCoordinator, attribute, gather)
    large = {name for name, weight in engine.model.named_parameters() if weight.ds_numel > sizes.persistent}
    return {name: count for name, count in counts.items() if name in large}
