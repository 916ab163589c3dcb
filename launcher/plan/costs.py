"""The cost of a run from start to end at a planned speed: hours, energy and money."""

import math
from typing import Any

from launcher.config.tree import RunConfig
from launcher.errors import UserError

HOUR = 3600.0
WATTS_OF_A_KW = 1000.0


def tokens_of(config: RunConfig) -> int:
    """Tokens that the configured updates train on."""
    return config.train.batches.samples_in(config.train.steps) * config.data.seq_len


def run_costs(
    tokens: int, tokens_per_second: float, n_gpus: int, watts: float | None, price: float | None
) -> dict[str, float | None]:
    """The run's hours, GPU-hours, kWh and cost, without restarts, checkpoints and evaluations.

    ``watts`` is the power of one GPU's board, taken as drawn all the time: an upper bound for the boards, without
    hosts, network and cooling. ``price`` is that of a GPU-hour. Energy without watts and cost without a price are None.
    """
    hours = tokens / tokens_per_second / HOUR
    gpu_hours = hours * n_gpus
    return {
        "hours": hours,
        "gpu_hours": gpu_hours,
        "watts_per_gpu": watts,
        "energy_kwh": gpu_hours * watts / WATTS_OF_A_KW if watts is not None else None,
        "price_per_gpu_hour": price,
        "cost": gpu_hours * price if price is not None else None,
    }


def check_price(price: float | None) -> None:
    """Raises UserError where the price is given but is not a finite number of at least 0."""
    if price is not None and not (math.isfinite(price) and price >= 0):
        rule = "must be a number of at least 0: what one GPU costs in an hour, in any currency"
        raise UserError([f"--price-per-gpu-hour={price:g} {rule}; try 2.5"])


def costs_line(plan: dict[str, Any], tokens: int) -> str:
    """A line with the run's hours, energy and price."""
    words = f"{tokens:,} tokens: {plan['hours']:,.2f} hours, {plan['gpu_hours']:,.1f} GPU-hours"
    if plan["energy_kwh"] is not None:
        words += f", {plan['energy_kwh']:,.1f} kWh at the boards' {plan['watts_per_gpu']:g} W"
    if plan["cost"] is not None:
        words += f", {plan['cost']:,.2f} at {plan['price_per_gpu_hour']:g} a GPU-hour"
    return f"{words}, without restarts"
