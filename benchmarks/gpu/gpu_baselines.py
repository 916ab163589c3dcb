"""Part 3: ceilings of the card, our step at published sizes, the head's chunks, and transformers' own classes.

Shape letters: B batch, S sequence, D d_model, V vocab_size.
"""

import dataclasses
from functools import partial
from typing import Any, Literal

import torch

import gpu_device
import gpu_kernels
from gpu_part import Check, Place
from gpu_runs import MODELS, Job, baseline, measured, published
from launcher.watch.speed import peak_flops_per_second
from modeling.config import ModelConfig
from modeling.counts import flops_per_token
from modeling.families.config_json import SpecialTokens, to_config_json
from modeling.loss import Head
from parallel.processes.start import run_ranks

HEAD_POWERS = (24, 25, 26, 27, 28, 29, 30)  # of two: logits that exist at once
DRY_POWER = 16  # by how many of them less in a dry run
KERNELS = 30
FIGURES = {"step_ms": "ms", "tokens_per_second": "tokens/s", "mfu": "%", "peak_gib": "GiB", "micro_batch_ms": "ms"}
Mode = Literal["eager", "compiled"]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A model of transformers' to be timed."""

    config: ModelConfig
    seq_len: int
    mode: Mode
    dry: bool


def checks(n_devices: int, *, dry: bool) -> list[Check]:
    """The part's checks: the cheap ones first, then ours, then theirs."""
    found = [Check("copy", check_copy, 60), Check("matmul", check_matmul, 60)]
    found += [Check("head chunks", check_head, 90), *gpu_kernels.checks()]
    found += [Check(f"{name}: roundtable", partial(check_ours, name), 150) for name in MODELS]
    modes: tuple[Mode, ...] = ("eager", "compiled")
    for mode in modes:
        found += [Check(f"{name}: transformers {mode}", partial(check_peer, name, mode), 150) for name in MODELS]
    return found


def check_copy(place: Place) -> None:
    """The rate of a copy within the device's memory, bytes read and bytes written."""
    n_bytes = place.small(2**32, 2**22)
    source = torch.randint(256, (n_bytes,), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    seconds = gpu_device.seconds_of(lambda: target.copy_(source), place.device, repeats=10)
    assert torch.equal(source[-1024:], target[-1024:])
    place.figure("copy", 2 * n_bytes / seconds / 1e9, "GB/s")


def check_matmul(place: Place) -> None:
    """The rate of matrix products of random numbers: of zeros they are faster, for want of power."""
    size = place.small(8192, 128)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        left, right = (torch.randn(size, size, device=place.device).to(dtype) for _ in range(2))
        seconds = gpu_device.seconds_of(lambda a=left, b=right: a @ b, place.device, repeats=10, warm_up=3)
        place.figure(f"matmul {str(dtype).removeprefix('torch.')}", 2 * size**3 / seconds / 1e12, "TFLOP/s")


def check_head(place: Place) -> None:
    """Forward and backward of Llama 3 8B's head over 8,192 tokens, by the logits that exist at once."""
    n_tokens, d_model, vocab_size = place.small((8192, 4096, 128256), (64, 32, 512))
    device = place.device
    head = Head(vocab_size, d_model).to(device, torch.bfloat16)
    torch.nn.init.normal_(head.weight, std=0.02)
    hidden_BSD = torch.randn(1, n_tokens, d_model, device=device).bfloat16().requires_grad_()
    targets_BS = torch.randint(vocab_size, (1, n_tokens), device=device)

    def once() -> None:
        head.weight.grad = hidden_BSD.grad = None
        loss, _ = head(hidden_BSD, targets_BS)
        loss.backward()

    for power in HEAD_POWERS:
        head.chunk_logits = 2 ** (power - (DRY_POWER if place.dry else 0))
        once()
        gpu_device.forget(device)
        seconds = gpu_device.seconds_of(once, device, repeats=5, warm_up=1)
        place.figure(f"2^{power} ms", 1000 * seconds, "ms")
        place.figure(f"2^{power} GiB", gpu_device.peak_gib(device), "GiB")


def check_ours(name: str, place: Place) -> None:
    """A step of the real loop."""
    trace = None if place.report is None else place.report.path.with_name(f"{name.split()[0].lower()}.trace.json.gz")
    job = Job(baseline(name, place), place.dry, steps=place.small(3, 2), kernels=KERNELS, trace=trace)
    found = measured(job, place.seconds(145))
    tell(found, place)
    assert found["kernels"], "the profiler saw no kernel"


def tell(found: dict[str, Any], place: Place) -> None:
    """Writes a measurement's figures down, where the host waited, and what the profiler saw."""
    for key, unit in FIGURES.items():
        place.figure(key, found[key], unit)
    place.figure("waits", found["waits"], "a step")
    place.figure("waited_at", found["waited_at"], "a step")
    for key in ("kernels", "busy_ms", "idle_ms", "gaps"):
        if key in found:
            place.figure(key, found[key], "ms of one step")


def check_peer(name: str, mode: Mode, place: Place) -> None:
    """Forward and backward of one micro-batch of 8,192 tokens by transformers' class, weights in bf16."""
    peer = Peer(published(name, place), place.small(8192, 64), mode, place.dry)
    found = run_ranks(measure_peer, 1, peer, timeout_seconds=place.seconds(145))[0]
    for key in ("micro_batch_ms", "mfu", "peak_gib"):
        place.figure(key, found[key], FIGURES[key])
    place.figure("attention", found["attention"], "")
    place.figure("experts", found["experts"], "")


def measure_peer(peer: Peer) -> dict[str, Any]:
    """In a process of its own: time, MFU and memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = gpu_device.the_device(dry=peer.dry)
    settings = to_config_json(peer.config, peer.seq_len, SpecialTokens(), "bfloat16")
    built = AutoConfig.for_model(**settings)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            built, attn_implementation="sdpa", dtype=torch.bfloat16, trust_remote_code=False
        )
    model.train()
    called = model if peer.mode == "eager" else torch.compile(model, backend="aot_eager" if peer.dry else "inductor")
    tokens_BS = torch.randint(peer.config.vocab_size, (1, peer.seq_len), device=device)

    def once() -> None:
        model.zero_grad(set_to_none=True)
        called(input_ids=tokens_BS, labels=tokens_BS, use_cache=False).loss.backward()

    once()
    gpu_device.forget(device)
    seconds = gpu_device.seconds_of(once, device, repeats=2 if peer.dry else 5, warm_up=1)
    peak = peak_flops_per_second(device, "bf16")
    flops = flops_per_token(peer.config, peer.seq_len) * peer.seq_len / seconds
    return {
        "micro_batch_ms": 1000 * seconds,
        "mfu": None if peak is None else 100 * flops / peak,
        "peak_gib": gpu_device.peak_gib(device),
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "experts": str(getattr(model.config, "_experts_implementation", None)),
    }
