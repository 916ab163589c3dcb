"""The memory of one rank's training step as `train` runs it, DeepSpeed included, traced over fake tensors.

The engine is built at its true size in a world whose collectives move nothing, and runs two steps. In the first one
lasting buffers are allocated and ZeRO 3 learns the order of the modules; the second one is measured.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import schedules

from launcher.config.tree import RunConfig
from launcher.estimate.ledger import Ledger
from launcher.estimate.pass_over import evenly, shares
from launcher.estimate.ranks import as_rank, deterministic, mesh_of
from launcher.estimate.samples import WholeSequences
from launcher.estimate.values import KnownAnswers, KnownValues
from launcher.plan.closed_forms import step_of_rank
from launcher.profile.run import watched
from launcher.profile.twins import WatchedEngine
from launcher.trace.kept import sort_kept
from launcher.trace.regions import Regions
from launcher.traffic.matrices import shares_in_group
from launcher.training.compiling import fuse_of
from launcher.training.loop import build_engine, run_step
from launcher.training.state import TrainState
from modeling.loss import CUDA_CHUNK_LOGITS
from modeling.moe import MoE
from parallel.expert import RowSizes, make_dispatch
from parallel.mesh import Axis, Mesh
from parallel.offload import AtOnce
from parallel.recompute import offloader_in
from parallel.sizes import DEFAULT_SIZES, Sizes
from parallel.zero.fragments import Share
from parallel.zero.weights import HeldWeight

ON_GPU = dataclasses.replace(DEFAULT_SIZES, row_multiple=1, chunk_logits=CUDA_CHUNK_LOGITS)  # the sizes used on CUDA


@dataclass
class StepMemory:
    """The bytes of a rank's tensors in a step, at the moment at which they are the most."""

    at_peak: dict[str, int]  # bytes by purpose, at that moment
    phase: str  # the phase of the step in which that moment lies
    between_steps: int
    host: int = 0  # bytes of the host's memory in which offloaded activations wait

    @property
    def peak(self) -> int:
        """The largest number of bytes held at once."""
        return sum(self.at_peak.values())


def measure_memory(
    config: RunConfig, world_size: int, rank: int, device: torch.device, sizes: Sizes, imbalance: float = 1.0
) -> StepMemory:
    """The memory of a rank's tensors in a step of the config's largest batch.

    ``imbalance`` is the number of rows that arrive over ep, as a multiple of the mean. To be called in a process
    without a process group, with ``device`` open where it is a CUDA device.
    """
    samples, state, known = WholeSequences(config), TrainState(), KnownValues()
    with fake_rank(config, world_size, rank, device, known) as mesh, Ledger(device.type) as ledger:
        fuse = fuse_of(config.train.compile, device.type, sizes.row_piece_bytes)
        copies = AtOnce() if config.train.offload_activations else None
        engine = build_engine(config, mesh, sizes, WatchedEngine, fuse, copies)
        assert isinstance(engine, WatchedEngine)
        route(engine, config, mesh, sizes, imbalance)
        engine.publish_weights()
        ledger.sort(lasting(engine))
        sort_kept(engine.products, ledger.sort)
        ledger.regions = regions = Regions()
        with watched(engine, regions), regions.within("bookkeeping"):
            run_step(config, engine, samples, state)  # type: ignore[arg-type]
            between = ledger.total
            ledger.begin()
            run_step(config, engine, samples, state)  # type: ignore[arg-type]
        offloader = offloader_in(engine.model)
        host = offloader.pool.n_bytes if offloader is not None else 0
    at_peak = {name: count for name, count in ledger.at_peak.items() if count}
    return StepMemory(at_peak, ledger.peak_phase, between, host)


@contextlib.contextmanager
def fake_rank(
    config: RunConfig, world_size: int, rank: int, device: torch.device, known: KnownValues
) -> Iterator[Mesh]:
    """Makes this process a rank of `train` in a world whose collectives move nothing; all tensors made in it are fake.

    ``known`` answers for their values. To be entered in a process without a process group. Yields the rank's mesh.
    """
    import parallel.zero.matrices as dealt
    import parallel.zero.patches as patches
    from parallel.zero.absent import absent_gpu

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(absent_gpu())
        stack.enter_context(as_rank(rank, world_size))
        stack.enter_context(deterministic(config.train.deterministic))
        mesh = mesh_of(config.parallel, world_size, rank, device)
        stack.enter_context(patches.replaced(torch.utils, swap_tensors=leave_as_they_are))
        stack.enter_context(patches.replaced(torch.cuda, **without_driver()))
        stack.enter_context(patches.replaced(dealt, shares_of_all=known_shares(config, world_size, mesh)))
        stack.enter_context(patches.replaced(schedules, _batch_p2p=sends_that_hold(schedules._batch_p2p)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(known)
        stack.enter_context(KnownAnswers(known))
        yield dataclasses.replace(mesh, control=dist.group.WORLD)


def known_shares(config: RunConfig, world_size: int, mesh: Mesh) -> Callable[..., list[list[tuple[int, int]]]]:
    """A stand-in for the exchange in which ranks learn which elements each of them updates: it computes the same."""
    step = step_of_rank(config, world_size, mesh.pp.rank)

    def shares_of_all(held: Sequence[tuple[HeldWeight, Share | None]], axis: Axis) -> list[list[tuple[int, int]]]:
        shares = shares_in_group(step, axis.degree, [weight.name for weight, _ in held])
        return [[shares[weight.name][rank] for weight, _ in held] for rank in range(axis.degree)]

    return shares_of_all


@dataclass
class Sent:
    """A message under way, which keeps its tensors alive until it is waited for, as gloo's messages do."""

    tensors: list[Tensor]

    def wait(self) -> None:
        """Ends the message, and releases its tensors."""
        self.tensors.clear()


def sends_that_hold(begin: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``begin`` (torch's ``_batch_p2p``), extended so that sent tensors live until the schedule waits for them.

    Real messages keep their tensors until then. The fake process group sends nothing, and would hold nothing.
    """

    def begun(ops: list[dist.P2POp], *rest: Any, **named: Any) -> list[Any]:
        return [*begin(ops, *rest, **named), Sent([op.tensor for op in ops])]

    return begun


def leave_as_they_are(first: Tensor, second: Tensor) -> None:
    """Does nothing. Replaces ``swap_tensors``, with which a module's ``to`` exchanges fake weights for themselves."""


def without_driver() -> dict[str, Any]:
    """Replacements, by name, for torch.cuda functions that need a driver: a nameless Hopper GPU with unused memory."""
    nameless = SimpleNamespace(name="", total_memory=0)
    return {
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: nameless,
        "get_device_name": lambda device=None: "",
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=None: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }


def lasting(engine: WatchedEngine) -> dict[str, list[Tensor]]:
    """The tensors that an engine keeps between steps: weights, masters and optimizer state."""
    states = [value for each in engine.base.state.values() for value in each.values() if isinstance(value, Tensor)]
    return {
        "weights": [*engine.model.parameters(), *engine.kept_weights().values()],
        "masters": [weight for group in engine.base.param_groups for weight in group["params"]],
        "optimizer state": states,
    }


def route(engine: WatchedEngine, config: RunConfig, mesh: Mesh, sizes: Sizes, imbalance: float) -> None:
    """Makes this rank send equal numbers of rows to every ep rank, and receive ``imbalance`` times as many."""
    if mesh.ep.degree == 1 or config.model.moe is None:
        return
    tokens = config.train.micro_batch_size * config.data.seq_len // (mesh.cp.degree * mesh.tp.degree)
    rows = row_sizes(tokens * config.model.moe.top_k, imbalance)
    for module in engine.model.modules():
        if isinstance(module, MoE):
            module.sender.dispatch = make_dispatch(
                mesh.ep,
                sizes.row_multiple,
                rows,
                overlap=config.parallel.ep_overlap,
                chunks=config.parallel.ep_chunks,
            )


def row_sizes(n_rows: int, imbalance: float) -> RowSizes:
    """A function that gives expert dispatch its row counts: ``n_rows`` sent, ``imbalance`` times as many received."""

    def sizes(counts_E: Tensor, theirs_NE: Tensor, parts: list[int]) -> list[list[list[int]]]:
        both = (n_rows, round(imbalance * n_rows))
        return [[evenly(each, len(theirs_NE)) for each in shares(total, parts)] for total in both]

    return sizes
