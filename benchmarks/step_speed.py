"""Times training steps on a CPU beside other trainers: tokens per second of processor time. Prints one JSON line.

    python benchmarks/step_speed.py [--steps 3] [--rounds 3] [--precision fp32|bf16|auto]

A MoE decoder of 44 million weights, 23 million of them active, of family qwen3_moe (16 experts of width 192, 4 a token;
vocabulary 16384). A step is forward, loss, backward, clipping and torch's AdamW over one batch of 8 x 512 tokens in
packed documents, one thread, all in one precision. Each side is a process of its own, run alternately; figures are
medians over rounds of speed and of peak resident memory. No side goes through DeepSpeed.

``transformers`` runs its sdpa attention with a mask of documents and its ``grouped_mm`` experts; ``_autocast`` is the
same with fp32 weights, where bf16 is asked for, and ``_compiled`` has each layer compiled by torch.compile.
``megatron_core`` and ``torchtitan`` are measured where they are installed (peer_models.py, docs/measurements.md). On a
CPU torchtitan cannot separate packed documents: its rows, and those of ``ours_whole_rows`` beside it, are one document
each. Ratios are explained at ``summary`` in sides.py.
"""

import resource
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.config import ModelConfig
from modeling.context import Context, attention_mask
from modeling.dtypes import DTYPES
from modeling.moe_config import MoEConfig
from sides import Figures, Side, compare

BATCH, SEQ_LEN = 8, 512
LENGTHS = (16, 400)  # document lengths are drawn uniformly between these
CLIP_NORM = 1.0
CONFIG = ModelConfig(
    family="qwen3_moe",
    vocab_size=16384,
    d_model=384,
    n_layers=8,
    n_heads=6,
    n_kv_heads=2,
    d_head=64,
    qk_norm=True,
    d_ff=768,
    moe=MoEConfig(n_experts=16, top_k=4, d_ff=192, score="softmax"),
)
SIDES = (
    Side(name="ours", beside=None),
    Side(name="transformers"),
    Side(name="transformers_autocast", precisions=("bf16",)),
    Side(name="transformers_compiled", compiled=True),
    Side(name="megatron_core", package="megatron-core"),
    Side(name="ours_whole_rows", beside=None),
    Side(name="torchtitan", beside="ours_whole_rows", package="torchtitan"),
)
WHOLE_ROWS = ("ours_whole_rows", "torchtitan")


def main() -> None:
    compare("step_speed", __file__, __doc__, SIDES, measure)


def measure(side: str, steps: int, precision: str) -> Figures:
    """The figures of one side, as ``measure_steps`` returns them."""
    return measure_steps(partial(build, side, DTYPES[precision]), steps, whole_rows=side in WHOLE_ROWS)


def measure_steps(build: "Callable[[], tuple[nn.Module, Loss]]", steps: int, *, whole_rows: bool) -> Figures:
    """Tokens a CPU second over ``steps`` steps after one that warms up, and the process's peak in GB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    start = 0.0
    for step in range(steps + 1):
        if step == 1:
            start = time.process_time()
        loss(*batch(step, whole_rows=whole_rows)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    rate = steps * BATCH * SEQ_LEN / (time.process_time() - start)
    return {"tokens_a_cpu_second": rate, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def batch(step: int, *, whole_rows: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random tokens, targets, positions and documents (B, S), determined by ``step``; documents are packed.

    With ``whole_rows`` each row is one document.
    """
    generator = torch.Generator().manual_seed(step)
    tokens_BS = torch.randint(CONFIG.vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
    positions, documents = [], []
    for _ in range(BATCH):
        lengths: list[int] = [SEQ_LEN] if whole_rows else []
        while sum(lengths) < SEQ_LEN:
            drawn = int(torch.randint(LENGTHS[0], LENGTHS[1] + 1, (), generator=generator))
            lengths.append(min(drawn, SEQ_LEN - sum(lengths)))
        positions.append(torch.cat([torch.arange(length) for length in lengths]))
        documents.append(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)))
    return tokens_BS[:, :-1], tokens_BS[:, 1:], torch.stack(positions), torch.stack(documents)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def build(side: str, dtype: torch.dtype) -> tuple[nn.Module, Loss]:
    """A side's model, and a function that computes its loss on a batch."""
    match side:
        case "ours" | "ours_whole_rows":
            return build_ours(CONFIG, dtype)
        case "transformers":
            return build_transformers(CONFIG, dtype)
        case "transformers_autocast":
            return build_transformers(CONFIG, torch.float32, autocast=True)
        case "transformers_compiled":
            return build_transformers(CONFIG, dtype, compiled=True)
        case "megatron_core":
            from peer_models import build_megatron_core

            return build_megatron_core(CONFIG, SEQ_LEN, dtype)
        case "torchtitan":
            from peer_models import build_torchtitan

            return build_torchtitan(CONFIG, SEQ_LEN, dtype)
    raise ValueError(side)


def build_ours(config: ModelConfig, dtype: torch.dtype) -> tuple[nn.Module, Loss]:
    """Roundtable's decoder, and a function that computes its loss on a batch."""
    from launcher.training.compiling import fuse_of
    from launcher.training.heap import keep_heap_from_growing
    from modeling.decoder import build_decoder
    from modeling.fused import fuse_chains
    from modeling.init import materialize

    with torch.device("meta"):
        model = build_decoder(config)
    materialize(model, config, 0, "cpu", dtype)
    keep_heap_from_growing()  # this and the next line are as in a run
    fuse_chains(model, fuse_of("auto", "cpu"))

    def loss(tokens_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor) -> Tensor:
        out = model(tokens_BS, Context(positions_BS, documents_BS), targets_BS)
        assert out.loss is not None
        return out.loss / targets_BS.numel()

    return model, loss


def build_transformers(
    config: ModelConfig, dtype: torch.dtype, *, autocast: bool = False, compiled: bool = False, has_mask: bool = True
) -> tuple[nn.Module, Loss]:
    """transformers' class of the same sizes, and a function that computes its loss on a batch.

    With ``autocast`` matrix products are in bf16. Without a mask each row must be one document.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from modeling.families.config_json import SpecialTokens, to_config_json

    settings = to_config_json(config, SEQ_LEN, SpecialTokens(), str(dtype).removeprefix("torch."))
    built = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(
        built,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
        dtype=dtype,
        trust_remote_code=False,
    )
    if compiled:
        for layer in model.model.layers:
            layer.compile()

    def loss(tokens_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor) -> Tensor:
        mask = None
        if has_mask:
            mask = attention_mask(positions_BS, documents_BS, positions_BS, documents_BS, None)[:, None]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(tokens_BS, attention_mask=mask, position_ids=positions_BS, use_cache=False)
        return F.cross_entropy(out.logits.float().flatten(0, 1), targets_BS.flatten())

    return model, loss


if __name__ == "__main__":
    main()
