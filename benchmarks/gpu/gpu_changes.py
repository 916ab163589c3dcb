"""Part 4: our step again, with one switch changed at a time. What it is compared with is measured first."""

import dataclasses
from functools import partial
from typing import Any

import torch
from torch.nn.attention import restore_flash_attention_impl

from gpu_baselines import KERNELS, tell
from gpu_part import Check, Place
from gpu_report import Skipped
from gpu_runs import MODELS, Job, baseline, measured
from launcher.errors import UserError
from launcher.training.flash import choose_flash_attention
from parallel.config import ParallelConfig
from parallel.sizes import DEFAULT_SIZES


@dataclasses.dataclass(frozen=True)
class Change:
    """What is otherwise than in the base: sizes, keys of `train`, of `parallel`, or the documents."""

    name: str
    train: dict[str, Any] = dataclasses.field(default_factory=dict)
    parallel: dict[str, Any] = dataclasses.field(default_factory=dict)
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    document: int | None = None  # tokens of each; else rows are cut out of longer ones
    kernels: int = 0  # so many of the profiler's top are told of


CHANGES = (
    Change("base"),
    Change("products of 8 bits", train={"precision": "fp8"}, kernels=KERNELS),
    Change("products of 8 bits, weights kept", train={"precision": "fp8", "fp8_keep_weights": True}, kernels=KERNELS),
    Change("nothing compiled", train={"compile": "off"}),
    Change("two sequences a micro-batch", train={"micro_batch_size": 2}),
    Change("documents of 1,024 tokens", document=1024),
    Change("head chunks of 2^27", sizes={"chunk_logits": 2**27}),
    Change("head chunks of 2^29", sizes={"chunk_logits": 2**29}),
    Change("recompute selective", train={"recompute": "selective"}),
    Change("recompute full", train={"recompute": "full"}),
    Change("deterministic", train={"deterministic": True}),
    Change("FlashAttention 3", train={"flash_attention": 3}),
    Change("FlashAttention 4", train={"flash_attention": 4}),
    Change("ZeRO 2", parallel={"zero": 2}),
    Change("ZeRO 3", parallel={"zero": 3}),
    Change("activations on the host", train={"recompute": "feed_forward", "offload_activations": True}),
)


def checks(n_devices: int, *, dry: bool) -> list[Check]:
    """Each change, of both models; the dry run takes every fourth, which are of all kinds."""
    pairs = [(change, name) for change in CHANGES for name in MODELS]
    if dry:
        pairs = [(change, name) for number, (change, name) in enumerate(pairs) if number % 8 in (0, 5)]
    return [Check(f"{name}: {change.name}", partial(check_change, change, name), 100) for change, name in pairs]


def check_change(change: Change, name: str, place: Place) -> None:
    """The step with the change."""
    if "flash_attention" in change.train:
        look_for_flash(change.train["flash_attention"], place.device)
    parallel = ParallelConfig(**{"zero": 1, **change.parallel})
    document = None if change.document is None else place.small(change.document, 8)
    config = baseline(name, place, parallel, document, **change.train)
    sizes = dataclasses.replace(DEFAULT_SIZES, **change.sizes)
    job = Job(config, place.dry, steps=place.small(3, 1), sizes=sizes, kernels=change.kernels)
    tell(measured(job, place.seconds(95)), place)


def look_for_flash(version: int, device: torch.device) -> None:
    """Raises Skipped where there is no such FlashAttention."""
    if device.type != "cuda":
        raise Skipped("flash attention is CUDA's")
    try:
        choose_flash_attention(version, device)
    except UserError as problem:
        raise Skipped(str(problem)) from None
    finally:
        restore_flash_attention_impl(_raise_warn=False)
