"""Plans of well-known training runs, compared with their published figures; none of them is used in a fit."""

from dataclasses import dataclass
from typing import Any

from launcher.closed_form.forecast import plan_row

HOUR = 3600.0


@dataclass(frozen=True)
class Anchor:
    """A run's published figure, and the row that describes the run."""

    name: str
    source: str
    stated: float
    unit: str
    row: dict[str, Any]
    tokens: float = 0.0  # of the whole run, where GPU-hours or days are stated


QWEN3 = {
    "name": "qwen3-30b-a3b",
    "layers": 48,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 4,
    "ffn": None,
    "vocab": 151936,
    "seq": 4096,
    "experts": 128,
    "topk": 8,
    "moe_ffn": 768,
    "params": 30.5e9,
}


def described(
    model: dict[str, Any], gpu: str, count: int, layout: dict[str, Any], batch: tuple[int, int]
) -> dict[str, Any]:
    """A row in the schema of benchmarks/published/rows.jsonl; ``batch``: (sequences of a step, micro-batch size)."""
    hw = {"gpu": gpu, "count": count, "per_node": 8}
    return {"model": model, "hw": hw, "layout": layout, "batch": {"global_seqs": batch[0], "micro": batch[1]}}


def anchors() -> list[Anchor]:
    """The runs. Each name says what was assumed where its source leaves the layout open."""
    deepseek = {
        "name": "deepseek-v3",
        "layers": 61,
        "hidden": 7168,
        "heads": 128,
        "kv_heads": 128,
        "ffn": 18432,
        "vocab": 129280,
        "seq": 4096,
        "experts": 256,
        "topk": 8,
        "moe_ffn": 2048,
        "shared_experts": 1,
        "mtp": 1,
        "params": 671e9,
    }
    llama = {
        "name": "llama3-405b",
        "layers": 126,
        "hidden": 16384,
        "heads": 128,
        "kv_heads": 8,
        "ffn": 53248,
        "vocab": 128256,
        "seq": 8192,
        "params": 405.85e9,
    }
    gpt3 = {"name": "gpt3-175b", "layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 51200, "seq": 2048}
    experts = {"dp": 16, "tp": 1, "pp": 1, "ep": 8, "zero": 1, "precision": "bf16"}
    return [
        Anchor(
            "DeepSeek-V3, 14.8T tokens: pp 16, ep 64, ZeRO 1, DualPipe, fp8",
            "arXiv 2412.19437, table 1",
            2.664e6,
            "H800 hours",
            described(
                deepseek,
                "H800",
                2048,
                {
                    "dp": 128,
                    "tp": 1,
                    "pp": 16,
                    "ep": 64,
                    "zero": 1,
                    "precision": "fp8",
                    "schedule": "dualpipe",
                    "recompute": "norm, up_proj",  # section 3.2.3
                },
                (15360, 1),
            ),
            14.8e12,
        ),
        Anchor(
            "Llama 3.1 405B on 16,384 H100: tp 8, pp 16, dp 128, 16M tokens a step",
            "arXiv 2407.21783, table 4: 380 to 430 TFLOP/s of a GPU",
            400.0,
            "TFLOP/s",
            described(
                llama,
                "H100",
                16384,
                {"dp": 128, "tp": 8, "pp": 16, "vpp": 8, "zero": 2, "precision": "bf16"},
                (2048, 1),
            ),
        ),
        Anchor(
            "GPT-3 175B, 300B tokens on 1,024 A100: tp 8, pp 8, full recomputation",
            "arXiv 2104.04473, section 5.1: 34 days",
            34.0,
            "days",
            described(
                gpt3,
                "A100",
                1024,
                {"dp": 16, "tp": 8, "pp": 8, "vpp": 2, "zero": 0, "recompute": "full", "precision": "fp16"},
                (1536, 1),
            ),
            300e9,
        ),
        Anchor(
            "Qwen3-30B-A3B on 16 H100, routing forced to be even: dp 16, ep 8 and micro-batches of 1 assumed",
            "stated by its trainers",
            13011.0,
            "tokens/s/GPU",
            described(QWEN3, "H100", 16, experts, (1024, 1)),
        ),
        Anchor(
            "the same with natural routing",
            "stated by its trainers",
            8655.0,
            "tokens/s/GPU",
            described(QWEN3, "H100", 16, {**experts, "routing": "natural"}, (1024, 1)),
        ),
    ]


def figure(anchor: Anchor, plan: dict[str, Any], seconds: float) -> float:
    """The plan's figure in the anchor's unit, for a step of so many seconds."""
    model, count, size = anchor.row["model"], anchor.row["hw"]["count"], anchor.row["batch"]["global_seqs"]
    tokens = size * model["seq"]
    match anchor.unit:
        case "H800 hours":
            return anchor.tokens / tokens * seconds * count / HOUR
        case "days":
            return anchor.tokens / tokens * seconds / (24 * HOUR)
        case "TFLOP/s":
            return 6 * model["params"] * tokens / seconds / count / 1e12
        case _:
            return tokens / seconds / count


def anchor_rows() -> list[str]:
    """The table of well-known runs as lines of Markdown, planned with the constants of files/constants.yaml."""
    lines = [
        "## Runs that everybody knows",
        "",
        "No row of these is fitted. Steps are planned; a run's hours are its tokens at that speed, without restarts.",
        "",
        "| run | stated | planned | interval | plan over stated | source |",
        "|---|---|---|---|---|---|",
    ]
    for anchor in anchors():
        plan = plan_row(anchor.row)
        at, low, high = (
            figure(anchor, plan, plan[key]) for key in ("step_seconds", "step_seconds_low", "step_seconds_high")
        )
        low, high = min(low, high), max(low, high)
        span = f"{low:,.4g} to {high:,.4g}" if at < 1e5 else f"{low:,.0f} to {high:,.0f}"
        told = f"{at:,.4g}" if at < 1e5 else f"{at:,.0f}"
        stated = f"{anchor.stated:,.0f} {anchor.unit}"
        lines.append(
            f"| {anchor.name} | {stated} | {told} | {span} | {at / anchor.stated - 1:+.0%} | {anchor.source} |"
        )
    return lines
