"""The legal values of the sampling options temperature, top_k and top_p."""

from collections.abc import Iterator

LEAST_TEMPERATURE = 1e-6  # logits divided by less leave the range of fp32


def sampling_rules(temperature: float, top_k: int | None, top_p: float | None) -> Iterator[tuple[str, float, str]]:
    """(name, value, the broken rule with a remedy) of each option that is out of its range."""
    if temperature != 0.0 and not LEAST_TEMPERATURE <= temperature < float("inf"):
        rule = f"must be 0 (the likeliest token), or at least {LEAST_TEMPERATURE} and finite"
        yield "temperature", temperature, f"{rule}; try 0.8"
    if top_k is not None and top_k < 1:
        yield "top_k", top_k, "must be at least 1; try 50"
    if top_p is not None and not 0.0 < top_p <= 1.0:
        yield "top_p", top_p, "must lie above 0 and at most at 1; try 0.95"
