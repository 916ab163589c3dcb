"""The report and the picture of a measured profile."""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from launcher.config.tree import RunConfig
from launcher.profile.picture import MEMORY, draw_memory
from launcher.profile.report import memory_json, rates_json, rows_of, top_of
from launcher.profile.run import RankProfile
from launcher.watch.picture import save_picture
from modeling.counts import flops_per_token


def report_of(config: RunConfig, found: list[RankProfile], out: Path) -> dict[str, Any]:
    """The report as JSON: rank 0's parts in full, and the other ranks' times by part.

    ``seconds`` in it are those of a step under the profiler, ``plain_seconds`` those without it.
    """
    first = found[0]
    plain = statistics.median(max(each) for each in zip(*(rank.plain_seconds for rank in found), strict=True))
    flops = flops_per_token(config.model, config.data.seq_len) * first.tokens
    peak = first.rates.peak.get(config.train.stored)
    reached = first.rates.products[config.train.stored]
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    names: dict[tuple[str, str], float] = defaultdict(float)
    for (part, phase, name), taken in first.times.items():
        seconds[part, phase] += taken
        names[part, name] += taken
    return {
        "kind": "measured",
        "says": says(config, found, plain, flops, reached),
        "machine": first.device,
        "world_size": len(found),
        "precision": config.train.precision,
        "own_tokens": first.own_tokens,
        "seconds": first.seconds,
        "plain_seconds": plain,
        "all_plain_seconds": [rank.plain_seconds for rank in found],
        "tokens": first.tokens,
        "tokens_per_second": first.tokens / plain,
        "model_flops": flops,
        "mfu": None if peak is None else flops / plain / (peak * len(found)),
        "of_measured_products": flops / plain / (reached * len(found)),
        "rates": rates_json(first.rates),
        "parts": rows_of(seconds, first.sums),
        "top": top_of(names),
        "ranks": [rank_json(rank) for rank in found],
        "memory": memory_json(fullest(found).memory) | {"rank": fullest(found).rank, "peak_gib": first.peak_gib},
    }


def says(config: RunConfig, found: list[RankProfile], plain: float, flops: float, reached: float) -> list[str]:
    """The lines of text before the table: the step, its time, the machine's rates and MFU."""
    first, n = found[0], len(found)
    steps = len(first.plain_seconds)
    batch = f"{first.tokens:,} {'of the config`s own' if first.own_tokens else 'random'} tokens".replace("`", "'")
    rates = first.rates
    lines = [
        f"{config.name}: a step of {batch} on {n} process{'es' if n > 1 else ''}, {first.device}, "
        f"{config.train.precision}",
        f"{plain * 1e3:,.0f} ms a step (median of {steps}), {first.tokens / plain:,.0f} tokens/s; under the profiler "
        f"{first.seconds * 1e3:,.0f} ms, which the table adds up to",
        f"this machine, each of {n} process{'es' if n > 1 else ''}: products "
        f"{', '.join(f'{rate / 1e9:,.1f} GFLOP/s in {name}' for name, rate in rates.products.items())}; copies "
        f"{rates.bandwidth / 1e9:.1f} GB/s; an operation {rates.launch_seconds * 1e6:.1f} us"
        + (f"; all-reduce {next(iter(rates.wires.values())) / 1e9:.2f} GB/s" if rates.wires else ""),
    ]
    peak = rates.peak.get(config.train.stored)
    share = flops / plain / (reached * n)
    mfu = f"{flops / plain / (peak * n):.1%}" if peak else "not known: the device's peak is not listed"
    return [*lines, f"MFU {mfu}; the model's FLOPs at {share:.1%} of the measured products in {config.train.stored}"]


def rank_json(rank: RankProfile) -> dict[str, Any]:
    """One rank's seconds by part, as JSON."""
    parts: dict[str, float] = defaultdict(float)
    for (part, _, _), taken in rank.times.items():
        parts[part] += taken
    return {"rank": rank.rank, "place": rank.place, "seconds": rank.seconds, "parts": dict(parts)}


def fullest(found: list[RankProfile]) -> RankProfile:
    """The rank whose tensors hold most at once."""
    return max(found, key=lambda rank: rank.memory.peak_bytes)


def draw(config: RunConfig, found: list[RankProfile], out: Path) -> None:
    """Writes the picture of the fullest rank's memory into the folder ``out``."""
    rank = fullest(found)
    where = f", {rank.place}" if len(found) > 1 else ""
    title = f"{config.name}: memory of tensors over a step{where} ({rank.device})"
    figure = draw_memory(title, rank.memory, "time in the step, slowed by looking at each operation")
    save_picture(figure, out / MEMORY, "--out")
