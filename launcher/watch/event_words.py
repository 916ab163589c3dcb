"""The words in which the terminal tells of a run's most common events. metrics.jsonl keeps the fields' own names."""

from collections.abc import Mapping
from typing import Any

# Event -> its name in words, and a phrase for each field. Fields without a phrase are shown as key=value.
WORDS: dict[str, tuple[str, dict[str, str]]] = {
    "start": ("training starts:", {}),
    "resume": ("training resumes from a checkpoint:", {"consumed": "{} samples consumed so far"}),
    "config_change": (
        "config changed since the last start:",
        {
            "key": "{}",
            "from": "was {}",
            "to": "now {}",
            "from_tokens": "first changed token of the data order {}",
            "consumed_tokens": "{} tokens consumed so far",
        },
    ),
    "plan": (
        "planned for a rank:",
        {
            "weights_gib": "weights {} GiB",
            "masters_gib": "fp32 master weights {} GiB",
            "optimizer_gib": "optimizer state {} GiB",
            "gradients_gib": "sums of gradients {} GiB",
            "buffers_gib": "gradients' buffers {} GiB",
            "activations_gib": "activations {} GiB",
            "head_gradient_gib": "the head's gradient {} GiB",
            "logits_gib": "logits {} GiB",
            "matrices_gib": "the optimizer's matrices {} GiB",
            "peak_gib": "peak {} GiB",
            "needs_gib": "needs {} GiB in all",
            "needs_low_gib": "low {} GiB",
            "needs_high_gib": "high {} GiB",
            "room_gib": "room {} GiB",
            "chance_not_to_fit": "chance not to fit {}",
            "gpu": "on {}",
            "step_seconds": "{} s a step",
            "step_seconds_low": "low {} s",
            "step_seconds_high": "high {} s",
            "tokens_per_second": "{} tokens/s",
        },
    ),
    "plan_miss": (
        "measured, beside the plan:",
        {
            "step_seconds": "{} s a step",
            "step_seconds_planned": "planned {} s",
            "step_seconds_miss": "relative error {}",
            "peak_gib": "peak {} GiB",
            "peak_gib_planned": "planned {} GiB",
            "peak_gib_miss": "relative error {}",
            "loader_wait_seconds": "waited {} s a step for data",
            "busiest_expert": "the busiest expert's load {} times the mean",
            "busiest_expert_planned": "planned {}",
        },
    ),
    "recompute": (
        "recomputation by layer:",
        {
            "layers": "{}",
            "planned_gib": "activations of {} GiB planned",
            "budget_gib": "train.activation_gib={}",
        },
    ),
    "packing": (
        "packed data:",
        {
            "padding": "share of padding {}",
            "cut": "share of documents split across sequences {}",
            "left_out": "share of tokens left out {}",
        },
    ),
    "compiled": ("kernels compiled:", {"chains": "{} so far", "seconds": "{} s for their first calls"}),
    "checkpoint": (
        "checkpoint saved",
        {"path": "to {}", "seconds": "took {} s", "hold_seconds": "training waited {} s for it"},
    ),
    "stopped": ("training stops, as asked", {"signal": "by {}"}),
}


def words_of(row: Mapping[str, Any]) -> str:
    """An event row in words, without its step: its fields as phrases, other fields as ``key=value``.

    An event that has no words is shown as its name and its fields. Lists are left out, since they may be long.
    """
    if row["event"] not in WORDS:
        return f"{row['event']}  {fields_text(row)}".rstrip()
    title, phrases = WORDS[row["event"]]
    shown = [phrases[key].format(text) if key in phrases else f"{key}={text}" for key, text in fields_of(row).items()]
    return f"{title} {', '.join(shown)}" if shown else title.rstrip(":")


def fields_text(row: Mapping[str, Any]) -> str:
    """An event row's fields as ``key=value`` texts; lists are left out, since they may be long."""
    return "  ".join(f"{key}={value}" for key, value in fields_of(row).items())


def fields_of(row: Mapping[str, Any]) -> dict[str, str]:
    """An event row's own fields as text, numbers with four digits; lists are left out."""
    shown = {key: value for key, value in row.items() if key not in ("step", "event") and not isinstance(value, list)}
    return {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in shown.items()}
