"""Writes made-up run directories: long runs with experts, spikes, restarts and hostile texts."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

# Text with HTML and a script, terminal escapes, line separators and quotes.
HOSTILE = "</script><script>window.stolen=1</script><img src=x onerror=stolen=1>\x1b[31m\x07\u2028\u202e&quot;'\"`${1}"
START = {"event": "start", "ranks": 4, "nodes": "n[1-2]", "slurm_job": "77", "slurm_restarts": 0}
START |= {"commit": "a1b2c3", "code_sha256": "0123456789ab", "init_from": None, "config_sha256": "ba9876543210"}
START |= {"python": "3.11.9", "torch": "2.11.0", "cuda": None, "device": "a CPU", "cores": 8}


def loss_at(step: int, steps: int, noise: float) -> float:
    """A loss that falls over the steps, with noise."""
    return 2.2 + 8.5 * math.exp(-9 * step / steps) + 1.2 * math.exp(-2 * step / steps) + 0.08 * noise


def update_rows(
    steps: int, *, layers: int = 2, experts: int = 8, seed: int = 0, shares_every: int = 1, spike: int | None = None
) -> Iterator[dict]:
    """Rows of updates as in metrics.jsonl. ``spike``: the one step whose loss is 9 higher."""
    rng, tokens = random.Random(seed), 0
    for step in range(1, steps + 1):
        tokens += 65536
        noise = rng.gauss(0, 1)
        row = {"step": step, "tokens": tokens, "loss": loss_at(step, steps, noise) + (9 if step == spike else 0)}
        row |= {"lr": 3e-4 * min(1, step / (0.02 * steps + 1)) * (0.55 + 0.45 * math.cos(math.pi * step / steps))}
        row |= {"grad_norm": math.exp(0.25 * rng.gauss(0, 1)) * (0.4 + 3 * math.exp(-20 * step / steps))}
        seconds = 0.41 + 0.01 * abs(rng.gauss(0, 1))
        row |= {"tokens_per_second": 65536 / seconds, "mfu": 0.17 / seconds, "peak_gib": 41.5, "step_seconds": seconds}
        for layer in range(1, layers + 1):
            row |= layer_numbers(f"moe/layer_{layer:02d}", step, experts, rng, with_shares=step % shares_every == 0)
        if layers:
            row |= {"moe/idle": 0.0, "moe/dropped": 0, "moe/balance_loss": 1 + 0.01 * abs(noise)}
        row |= {"data/web/share": 0.75, "data/web/epoch": step / steps, "data/code/share": 0.25}
        yield row | {"data/code/epoch": 3 * step / steps, "loader_wait_seconds": 0.0001}


def layer_numbers(prefix: str, step: int, experts: int, rng: random.Random, *, with_shares: bool) -> dict:
    """The keys of one MoE layer in a row, named as by ``launcher.watch.moe``, with made-up numbers."""
    if not with_shares:
        spread = 0.3 + 0.5 * rng.random()
        return {f"{prefix}/load_max": 1 + 2 * spread, f"{prefix}/load_min": 1 - spread, f"{prefix}/entropy": 1.9}
    weights = [math.exp(0.5 * math.sin(1.7 * e + step / 3000) + 0.1 * rng.random()) for e in range(experts)]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    row = {f"{prefix}/load_max": max(shares) * experts, f"{prefix}/load_min": min(shares) * experts}
    row[f"{prefix}/entropy"] = -sum(share * math.log(share) for share in shares)
    return row | {f"{prefix}/load": shares}


def write_run(path: Path, rows: list[dict] | Iterator[dict], config: str | None = None, tail: str = "") -> Path:
    """Writes a run directory with these rows of metrics.jsonl, then the text ``tail``; returns its path."""
    path.mkdir(parents=True)
    with (path / "metrics.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
        file.write(tail)
    if config is not None:
        (path / "config.yaml").write_text(config)
    return path


def lively_rows(steps: int, seed: int = 0, **options) -> Iterator[dict]:
    """Rows of a run with evaluations, checkpoints, a resume with another batch size, a spike and a rollback."""
    yield {"step": 0, **START}
    for row in update_rows(steps, seed=seed, spike=steps // 2, **options):
        step = row["step"]
        yield row
        if step == steps // 2:
            yield {"step": step, "event": "spike", "action": "report", "batch_loss": 12.5, "grad_norm": 3.0, "z": 31.0}
        if step % max(1, steps // 10) == 0:
            yield {"step": step, "eval_loss": row["loss"] + 0.05}
            yield {"step": step, "event": "checkpoint", "path": f"checkpoints/step-{step:08d}", "seconds": 1.5}
        if step == steps * 3 // 10:
            yield {"step": step, **START, "ranks": 8}
            yield {"step": step, "event": "resume", "consumed": 8 * step}
            change = {"event": "config_change", "key": "train.global_batch_size", "from": "8", "to": "16"}
            yield {"step": step, **change}
        if step == steps * 7 // 10:
            row = {"event": "rollback", "cause": "nonfinite", "at_step": step + 3, "samples_left_out": [10, 40]}
            yield {"step": step, **row, "action": "rollback", "tensor": "layers.1.mlp.up"}
