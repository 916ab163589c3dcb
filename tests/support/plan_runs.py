"""Measures the peak memory of a rank's tensors in a real training step over gloo, and plans the same step.

The measurement shares no code with the plan: it counts storages by their address in torch, from before the engine is
built.
"""

import dataclasses
import multiprocessing
import weakref
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.config.tree import RunConfig
from parallel.sizes import Sizes

# Rows are not rounded up, since a trace cannot know the number of rounded-up rows on a CPU. DeepSpeed's buffers are
# small: beside its default of 2 GB every error would be a small share.
SIZES = Sizes(
    row_multiple=1,
    bucket=1 << 18,
    persistent=1 << 10,
    prefetched=1 << 16,
    page_bytes=1 << 14,
    least_offloaded_bytes=1 << 12,
)


@dataclass
class Measured:
    """One rank's peak memory in bytes, and the rows received over rows sent on ep in its fullest pass."""

    peak: int
    imbalance: float


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages used by operations as long as something refers to them; meta ones have none."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, out)):
            if isinstance(each, torch.Tensor) and each.device.type != "meta":
                storage = each.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.gone, storage._cdata)
        self.most = max(self.most, self.now)
        return out

    def gone(self, address: int) -> None:
        self.now -= self.sizes.pop(address)


def measure_rank(config: RunConfig) -> Measured:
    """One rank of a real run: measures its second step. All ranks call it."""
    from launcher.estimate.samples import WholeSequences
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState
    from modeling.kernels.scratch import Scratch
    from modeling.moe import MoE
    from parallel.expert import make_dispatch, sizes_on_host
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(config.parallel, 240)
    shares = [1.0]

    def told(counts_E: Any, theirs_NE: Any, parts: list[int]) -> list[list[list[int]]]:
        sent, received = sizes_on_host(counts_E, theirs_NE, parts)
        shares.append(sum(map(sum, received)) / sum(map(sum, sent)))
        return [sent, received]

    samples: Any = WholeSequences(config)
    # Buffers that kernels keep between calls exist on a CPU only, and the plan is for a GPU.
    anew = patch.object(Scratch, "take", lambda self, name, shape, like: like.new_empty(shape))
    with anew, LiveBytes() as live:
        engine, state = build_engine(config, mesh, SIZES), TrainState()
        for module in engine.model.modules():
            if isinstance(module, MoE) and mesh.ep.degree > 1:
                module.sender.dispatch = make_dispatch(
                    mesh.ep, SIZES.row_multiple, told, chunks=config.parallel.ep_chunks
                )
        engine.initialize_weights(config.seed)
        run_step(config, engine, samples, state)
        live.most, shares[:] = live.now, [1.0]
        run_step(config, engine, samples, state)
    close_mesh()
    return Measured(live.most, max(shares))


def planned_peak(config: RunConfig, world_size: int, rank: int, imbalance: float) -> int:
    """The planned peak in bytes, traced for the CPU as the real run is, in a process of its own."""
    return sum(planned_holders(config, world_size, rank, imbalance).values())


def planned_holders(config: RunConfig, world_size: int, rank: int, imbalance: float) -> dict[str, int]:
    """The bytes of the planned peak by use (weights, gradients, activations, ...)."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(traced_holders, config, world_size, rank, imbalance).result()


def traced_holders(config: RunConfig, world_size: int, rank: int, imbalance: float) -> dict[str, int]:
    """The part of ``planned_holders`` that runs in the new process."""
    from launcher.estimate.whole_step import measure_memory

    torch._C._set_multithreading_enabled(False)
    return measure_memory(config, world_size, rank, torch.device("cpu"), SIZES, imbalance).at_peak


def with_parallel(config: RunConfig, **changes: Any) -> RunConfig:
    """The config with changes to its parallel section."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **changes))
