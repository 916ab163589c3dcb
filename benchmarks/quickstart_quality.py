"""Compares the quickstart's held-out loss with that of transformers' model on the same tokens. Prints one JSON line.

Roundtable (``ours``): `roundtable train configs/quickstart.yaml --ranks 2`. The other: the family's transformers class
of the same size with fp32 weights under bf16 autocast, torch's AdamW with the same groups, schedule and clipping,
packed samples in the same order with document masks, and its own auxiliary loss. Both are measured on the same held-out
samples and targets. Takes about fifteen minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.dataset import Dataset, open_dataset
from data.order import take
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.watch.metrics import read_metrics
from modeling.context import attention_mask
from modeling.families.config_json import SpecialTokens, to_config_json
from modeling.schedules import lr_factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    with tempfile.TemporaryDirectory() as folder:
        ours = train_ours(arguments.config, arguments.overrides, Path(folder) / "run")
    theirs = train_theirs(config)
    result = {"benchmark": "quickstart_quality", "ours": ours, "transformers": theirs, "ratio": ours / theirs}
    print(json.dumps({**result, "steps": config.train.steps, "eval_sequences": config.train.eval_sequences}))


def train_ours(path: Path, overrides: list[str], run_dir: Path) -> float:
    """Trains with Roundtable; returns the held-out loss after the last step."""
    command = [sys.executable, "-m", "launcher", "train", str(path), "--ranks", "2", *overrides]
    subprocess.run([*command, f"run_dir={run_dir}", "metrics.wandb.mode=disabled"], check=True, stdout=sys.stderr)
    return [row["eval_loss"] for row in read_metrics(run_dir / "metrics.jsonl") if "eval_loss" in row][-1]


def train_theirs(config: RunConfig) -> float:
    """Trains transformers' model for the same steps; returns its held-out loss."""
    torch.set_num_threads(2)
    torch.manual_seed(config.seed)
    model = build_theirs(config)
    optimizer = config.optimizer.build(groups(model, config), fused=True)
    train, heldout = (
        open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split=split)
        for split in ("train", "heldout")
    )
    batches = config.train.batches
    for step in range(1, config.train.steps + 1):
        batch_size = batches.size_at(step)
        indices = take(batches.samples_in(step - 1), batch_size)
        n_targets, _ = train.count(indices)
        for part in np.split(indices, batch_size // config.train.micro_batch_size):
            loss, auxiliary = losses(model, train, part)
            (loss / n_targets + auxiliary * (len(part) / batch_size)).backward()
        if config.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr * lr_factor(config.schedule, step, config.train.steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(
                f"transformers step {step}: loss {float(loss) / n_targets * batch_size / len(part):.3f}",
                file=sys.stderr,
            )
    return heldout_loss(model, heldout, config)


def build_theirs(config: RunConfig) -> nn.Module:
    """The family's transformers class, with its own initialization."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = to_config_json(config.model, config.data.seq_len, SpecialTokens(), torch.float32)
    settings |= {"output_router_logits": True, "router_aux_loss_coef": 1e-3}
    built = AutoConfig.for_model(**settings)
    return AutoModelForCausalLM.from_config(
        built, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=False
    )


def groups(model: nn.Module, config: RunConfig) -> list[dict]:
    """The optimizer's parameter groups: weight decay on matrices but not on the embedding, as in Roundtable."""
    matrices = [
        p for name, p in model.named_parameters() if p.ndim >= 2 and "embed" not in name and "lm_head" not in name
    ]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [{"params": matrices, "weight_decay": config.optimizer.weight_decay}, {"params": rest, "weight_decay": 0.0}]


def losses(model: nn.Module, dataset: Dataset, indices: np.ndarray) -> tuple[Tensor, Tensor]:
    """The sum of the targets' cross-entropies, and the model's own auxiliary loss."""
    batch = dataset.read(indices)
    documents_BS, positions_BS = torch.from_numpy(batch.documents_BS), torch.from_numpy(batch.positions_BS)
    mask_BSS = attention_mask(positions_BS, documents_BS, positions_BS, documents_BS, None)
    with torch.autocast("cpu", torch.bfloat16):
        output = model.model(  # not the whole model, whose auxiliary loss would take the 4D mask for one of padding
            input_ids=torch.from_numpy(batch.tokens_BS),
            attention_mask=mask_BSS[:, None],
            position_ids=positions_BS.long(),
            use_cache=False,
            output_router_logits=True,
        )
        logits_BSV = model.lm_head(output.last_hidden_state)
    targets_T = torch.from_numpy(batch.targets_BS).flatten()
    loss = F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_T, reduction="sum")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    settings = model.config
    balance = load_balancing_loss_func(output.router_logits, settings.num_experts, settings.num_experts_per_tok)
    return loss, settings.router_aux_loss_coef * torch.as_tensor(balance)


@torch.no_grad()
def heldout_loss(model: nn.Module, heldout: Dataset, config: RunConfig) -> float:
    """The mean token cross-entropy over the held-out samples that Roundtable evaluates."""
    indices = np.arange(min(config.train.eval_sequences, heldout.n_samples))
    total = sum(float(losses(model, heldout, indices[start : start + 8])[0]) for start in range(0, len(indices), 8))
    return total / heldout.count(indices)[0]


if __name__ == "__main__":
    main()
