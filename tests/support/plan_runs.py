"""The most that a rank's tensors hold in a real training step over gloo, and what a plan says of it.

The count shares no code with the plan's: storages by their address in torch, from before the engine is built.
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

# One row for each pair: the CPU's rounded-up rows have numbers that no trace knows. Small buffers of DeepSpeed's: of
# its own, 2 GB, every error would be a small share.
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
    """What one rank measured: bytes, and the rows it received over ep in the fullest pass, over those it sent."""

    peak: int
    imbalance: float


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations have met and that something still refers to; of those that have memory."""

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
    """One rank of a real run: its second step."""
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
    # What kernels keep between calls is a CPU's alone: a plan is of a GPU.
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
    """What the plan says, traced on the CPU as the run is, in a process of its own."""
    return sum(planned_holders(config, world_size, rank, imbalance).values())


def planned_holders(config: RunConfig, world_size: int, rank: int, imbalance: float) -> dict[str, int]:
    """The bytes of the planned peak, by what they are for."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(traced_holders, config, world_size, rank, imbalance).result()


def traced_holders(config: RunConfig, world_size: int, rank: int, imbalance: float) -> dict[str, int]:
    """In the process of ``planned_holders``."""
    from launcher.estimate.whole_step import measure_memory

    torch._C._set_multithreading_enabled(False)
    return measure_memory(config, world_size, rank, torch.device("cpu"), SIZES, imbalance).at_peak


def with_parallel(config: RunConfig, **changes: Any) -> RunConfig:
    """The config under another layout."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **changes))
