"""Training steps on a CPU, ours beside transformers' own class: tokens a second of processor time. One JSON line.

    python benchmarks/step_speed.py [--steps 3] [--rounds 3]

A MoE decoder of 44 million weights, 23 million of them active, of family qwen3_moe (16 experts of width 192, 4 a token;
vocabulary 16384). A step is forward, backward and torch's AdamW over one batch of 8 x 512 tokens in packed documents,
in bf16 throughout, one thread. Each side is a process of its own, in turn; figures are medians over rounds, and
peaks of resident memory. No side goes through DeepSpeed. transformers runs its eager sdpa attention with a mask of
documents and its ``grouped_mm`` experts, once as ours and once with fp32 weights and autocast. ``ratio`` is our speed
over that of the faster of the two, ``peak_ratio`` our peak over the smaller one.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.config import ModelConfig, MoEConfig
from modeling.context import Context, attention_mask

BATCH, SEQ_LEN = 8, 512
LENGTHS = (16, 400)  # of documents: drawn evenly between
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
SIDES = ("ours", "transformers", "transformers_autocast")


def main() -> None:
    compare("step_speed", __file__, __doc__, SIDES, measure)


def compare(
    name: str, script: str, about: str | None, sides: tuple[str, ...], measure: Callable[[str, int], dict[str, float]]
) -> None:
    """Measures ``sides``, ours first and the peers after it, each in processes of ``script`` of its own; one JSON line.

    ``measure(side, steps)`` gives ``tokens_a_cpu_second`` and ``peak_gb`` of the process that calls it.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=sides)
    arguments = parser.parse_args()
    if arguments.side is not None:
        print(json.dumps(measure(arguments.side, arguments.steps)))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(arguments.rounds):
        for side in sides:
            command = [sys.executable, script, "--side", side, "--steps", str(arguments.steps)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
    figures = {
        side: {key: round(median(each[key] for each in rounds), 2) for key in rounds[0]}
        for side, rounds in found.items()
    }
    speed, peak = ({side: figures[side][key] for side in sides} for key in ("tokens_a_cpu_second", "peak_gb"))
    ours, *peers = sides
    ratios = {
        "ratio": round(speed[ours] / max(speed[peer] for peer in peers), 3),
        "peak_ratio": round(peak[ours] / min(peak[peer] for peer in peers), 3),
    }
    print(json.dumps({"benchmark": name, "torch": torch.__version__, **figures, **ratios}))


def measure(side: str, steps: int) -> dict[str, float]:
    """Tokens a CPU second over ``steps`` steps after one that warms up, and the process's peak in GB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = build_ours() if side == "ours" else build_theirs(autocast=side == "transformers_autocast")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    start = 0.0
    for step in range(steps + 1):
        if step == 1:
            start = time.process_time()
        loss(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    rate = steps * BATCH * SEQ_LEN / (time.process_time() - start)
    return {"tokens_a_cpu_second": rate, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def batch(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, targets, positions and documents (B, S)."""
    generator = torch.Generator().manual_seed(step)
    tokens_BS = torch.randint(CONFIG.vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
    positions, documents = [], []
    for _ in range(BATCH):
        lengths: list[int] = []
        while sum(lengths) < SEQ_LEN:
            drawn = int(torch.randint(LENGTHS[0], LENGTHS[1] + 1, (), generator=generator))
            lengths.append(min(drawn, SEQ_LEN - sum(lengths)))
        positions.append(torch.cat([torch.arange(length) for length in lengths]))
        documents.append(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)))
    return tokens_BS[:, :-1], tokens_BS[:, 1:], torch.stack(positions), torch.stack(documents)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def build_ours() -> tuple[nn.Module, Loss]:
    """Our decoder, and its loss by a batch."""
    from modeling.decoder import build_decoder
    from modeling.init import materialize

    with torch.device("meta"):
        model = build_decoder(CONFIG)
    materialize(model, CONFIG, 0, "cpu", torch.bfloat16)

    def loss(tokens_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor) -> Tensor:
        out = model(tokens_BS, Context(positions_BS, documents_BS), targets_BS)
        assert out.loss is not None
        return out.loss / targets_BS.numel()

    return model, loss


def build_theirs(*, autocast: bool) -> tuple[nn.Module, Loss]:
    """transformers' class of the same sizes, in bf16 or in fp32 with bf16 by autocast, and its loss by a batch."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from modeling.families.config_json import SpecialTokens, to_config_json

    settings = to_config_json(CONFIG, SEQ_LEN, SpecialTokens(), "bfloat16")
    built = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(
        built,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
        dtype=torch.float32 if autocast else torch.bfloat16,
        trust_remote_code=False,
    )

    def loss(tokens_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor) -> Tensor:
        mask_BSS = attention_mask(positions_BS, documents_BS, positions_BS, documents_BS, None)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(tokens_BS, attention_mask=mask_BSS[:, None], position_ids=positions_BS, use_cache=False)
        return F.cross_entropy(out.logits.float().flatten(0, 1), targets_BS.flatten())

    return model, loss


if __name__ == "__main__":
    main()
