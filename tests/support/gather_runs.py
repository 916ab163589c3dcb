"""Records how often, and in which order, DeepSpeed's ZeRO 3 really gathers weights in one training step."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from launcher.config.tree import RunConfig
from parallel.sizes import Sizes
from rendezvous import Queue, recording

PRELOAD = ("launcher.training.loop",)
WARM_UP = 3  # steps; ZeRO 3 learns the order of the modules in its first pass, and decides what to drop in its second


def count_gathers(config: RunConfig, cases: Sequence[Sizes]) -> list[dict[str, int]]:
    """For each of the sizes, how often each weight is gathered in one step, prefetching included. All ranks call it."""
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(config.parallel, 240)
    found = [count_step(config, mesh, sizes) for sizes in cases]
    close_mesh()
    return found


def begun_in_step(config: RunConfig, sizes: Sizes) -> Queue:
    """This rank's queue of communications in one step. All ranks call it.

    Sets of weights have the opposite order on every second rank, as they may have by the weights' addresses.
    """
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(config.parallel, 240)
    hash_in_order_of_use(ascending=mesh.rank % 2 == 0)
    _, step = warmed_up(config, mesh, sizes)
    with recording() as queue:
        step()
    close_mesh()
    return queue


def hash_in_order_of_use(*, ascending: bool) -> None:
    """Makes the hashes of weights, by which sets order them, rise or fall in the order in which they are first used."""
    hashes: dict[int, int] = {}

    def hashed(weight: torch.nn.Parameter) -> int:
        number = 16 + len(hashes)  # -1 and -2 would be the same hash
        return hashes.setdefault(id(weight), number if ascending else -number)

    torch.nn.Parameter.__hash__ = hashed  # type: ignore[method-assign]


def warmed_up(config: RunConfig, mesh: Any, sizes: Sizes) -> tuple[Any, Callable[[], object]]:
    """An engine after WARM_UP steps, and a function that makes one more. All ranks call both."""
    from data.dataset import open_dataset
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState

    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    engine = build_engine(config, mesh, sizes)
    engine.initialize_weights(config.seed)
    step = partial(run_step, config, engine, dataset, TrainState())
    for _ in range(WARM_UP):
        step()
    return engine, step


def count_step(config: RunConfig, mesh: Any, sizes: Sizes) -> dict[str, int]:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    engine, step = warmed_up(config, mesh, sizes)
    names = {id(weight): name for name, weight in engine.model.named_parameters()}
    counts, attribute = Counter[str](), "_PartitionedParameterCoordinator__all_gather_params_"
    gather = getattr(PartitionedParameterCoordinator, attribute)

    def counted(self: Any, weights: Any, *rest: Any, **options: Any) -> Any:
        missing = [weight for weight in weights if weight.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        counts.update(names[id(weight)] for weight in missing)
        return gather(self, weights, *rest, **options)

    setattr(PartitionedParameterCoordinator, attribute, counted)
    try:
        step()
    finally:
        setattr(PartitionedParameterCoordinator, attribute, gather)
    large = {name for name, weight in engine.model.named_parameters() if weight.ds_numel > sizes.persistent}
    return {name: count for name, count in counts.items() if name in large}
