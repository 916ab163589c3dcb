"""Measures the time that recomputation costs on a CPU and the memory that it saves. Prints one JSON line.

    python benchmarks/recomputation.py [--starts 3] [--turns 3] [--precision fp32|bf16|auto]

A dense decoder and one of experts, 8 layers each, d_model 384, over 4 x 512 tokens, one thread, by ``train.recompute``.
``time`` is the processor time of forward and backward over that of ``none``; ``activations`` are the bytes that the
layers have kept for the backward pass when the head begins (all tensors that exist then, less those from before the
forward pass), over those of ``none``. As in a run, norms and rotations are computed in pieces of rows, and memory is
returned to the system; ``activations_plain`` are those with plain operations, for each of which autograd keeps what it
needs, over those of ``none`` there. Each side is a process of its own, which runs a step when its turn comes, and is
started anew after some turns; times are medians over all turns, ratios medians of the turns'. Bytes are the same each
time, and counted once.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from unittest.mock import patch

import torch
from torch import nn

from cpu_precision import add_precision, choose_precision
from launcher.estimate.ledger import Ledger
from launcher.training.compiling import fuse_of
from launcher.training.heap import keep_heap_from_growing
from modeling.config import ModelConfig
from modeling.context import Context
from modeling.decoder import Decoder, build_decoder
from modeling.dtypes import DTYPES
from modeling.fused import fuse_chains
from modeling.init import materialize
from modeling.kernels.fuse import Fuse, plainly
from modeling.kernels.scratch import Scratch
from modeling.moe_config import MoEConfig
from parallel.recompute import Recompute, apply_recompute
from sides import in_turn, takes_turns

BATCH, SEQ_LEN = 4, 512
DENSE = ModelConfig(vocab_size=4096, d_model=384, n_layers=8, n_heads=6, n_kv_heads=2, d_head=64, d_ff=1024)
MODELS = {"dense": DENSE, "experts": replace(DENSE, moe=MoEConfig(n_experts=16, top_k=4, d_ff=192))}
MODES: tuple[Recompute, ...] = ("none", "selective", "feed_forward", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--side", nargs=2, metavar=("MODEL", "MODE"))
    parser.add_argument("--bytes", action="store_true", help="with --side: count its activations instead of timing it")
    add_precision(parser)
    arguments = parser.parse_args()
    if arguments.side is not None:
        name, mode = arguments.side
        torch.set_num_threads(1)
        if arguments.bytes:
            print(json.dumps(count_bytes(name, mode, arguments.precision)))
        else:
            takes_turns(step_of(name, mode, arguments.precision))
        return
    chosen = choose_precision(arguments.precision)
    options = ["--precision", str(chosen["precision"])]
    times: dict[tuple[str, str], list[float]] = {}
    for model in MODELS:
        sides = [(model, mode) for mode in MODES]
        times |= in_turn(__file__, sides, options, arguments.starts, arguments.turns)
    kept = {side: bytes_of(*side, *options) for side in times}
    line: dict[str, object] = {"benchmark": "recomputation", "torch": torch.__version__, **chosen}
    for model, mode in times:
        side, none = (model, mode), (model, "none")
        line[f"{model} {mode}"] = {
            "milliseconds": round(median(times[side])),
            "time": round(median(each / least for each, least in zip(times[side], times[none], strict=True)), 3),
            "activations_mb": round(kept[side]["activations"] / 1e6, 1),
            **{kind: round(n_bytes / kept[none][kind], 3) for kind, n_bytes in kept[side].items()},
        }
    print(json.dumps(line))


def bytes_of(model: str, mode: str, *options: str) -> dict[str, float]:
    """Runs a side's process with --bytes; returns the bytes that it counts."""
    command = [sys.executable, __file__, "--side", model, mode, *options, "--bytes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def step_of(name: str, mode: Recompute, precision: str) -> Callable[[], float]:
    """A function that runs one step and returns its milliseconds of processor time."""
    keep_heap_from_growing()
    model = build(name, mode, precision, fuse_of("auto", "cpu"))
    seeds = itertools.count()

    def step() -> float:
        begin = time.process_time()
        run_step(model, next(seeds))
        return 1000 * (time.process_time() - begin)

    return step


def count_bytes(name: str, mode: Recompute, precision: str) -> dict[str, float]:
    """The bytes of the layers' activations with chains computed as in a run, and with plain operations."""
    fuses = {"activations": fuse_of("auto", "cpu"), "activations_plain": plainly}
    return {kind: activations(build(name, mode, precision, fuse)) for kind, fuse in fuses.items()}


def build(name: str, mode: Recompute, precision: str, fuse: Fuse) -> Decoder:
    """The model, with its chains computed by ``fuse`` and its layers recomputed by ``mode``."""
    with torch.device("meta"):
        model = build_decoder(MODELS[name])
    materialize(model, MODELS[name], 0, "cpu", DTYPES[precision])
    fuse_chains(model, fuse)
    apply_recompute(model, mode)
    return model


def activations(model: Decoder) -> float:
    """The bytes of tensors that exist when the head begins and did not before the forward pass."""
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(ledger.total)

    assert isinstance(model.head, nn.Module)
    # Buffers that kernels keep between calls are no activations: here they get new memory, freed when they are done.
    anew = patch.object(Scratch, "take", lambda self, name, shape, like: like.new_empty(shape))
    with anew, Ledger() as ledger:
        for weight in model.parameters():
            ledger.see(weight.data, "weights")
        before = ledger.total
        with model.head.register_forward_pre_hook(look):
            run_step(model, 0)
    return seen[0] - before


def run_step(model: Decoder, seed: int) -> None:
    """Forward and backward over a batch of random tokens; the gradients are dropped."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(MODELS["dense"].vocab_size, (BATCH, SEQ_LEN), generator=generator)
    positions_BS = torch.arange(SEQ_LEN).expand(BATCH, SEQ_LEN)
    out = model(tokens_BS, Context(positions_BS, torch.zeros_like(positions_BS)), tokens_BS.roll(-1, 1))
    assert out.loss is not None
    out.loss.backward()
    model.zero_grad()


if __name__ == "__main__":
    main()
