"""The settings of the public recipes behind published MoE measurements, by release, read from the recipes' own files.

A release's table names model, GPUs, batch and layout. Its recipe says the rest: how tokens are dispatched to experts
and whether that is overlapped, which CUDA graphs are used, what is recomputed. Nothing is inferred from measured steps.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Shares of a layer's launches outside of its experts that graphs replay: the router with all that comes before
# dispatch, and attention too.
ROUTER = 0.4
ATTENTION_AND_ROUTER = 0.8
BRIDGE = "megatron-bridge"
BLACKWELL = ("b200", "b300", "gb200", "gb300")
RACKS = ("gb200", "gb300")
BOXES = ("b200", "b300", "h100")
UP_PROJECTION = frozenset({"up projection"})
NORMS_AND_ACTIVATIONS = frozenset({"norms", "activations"})
WHOLE = {"graphed": 1.0, "fused_experts": True, "hides_dispatch": True, "low_attention": True, "dispatch": "nodes"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of some models on some GPUs, from one release and before another."""

    models: tuple[str, ...]  # beginnings of the models' names
    gpus: tuple[str, ...]
    first: str = "0"
    before: str = "99"
    precisions: tuple[str, ...] = ()  # empty: all
    source: str = BRIDGE
    changes: Mapping[str, Any]  # fields of System
    why: str  # with the document that says so


# Later recipes override earlier ones.
RECIPES: list[Recipe] = [
    Recipe(
        models=("deepseek-v3",),
        gpus=(*BLACKWELL, "h100"),
        changes={"n_further": 1, "again": UP_PROJECTION},
        why="one module for further tokens (`m` in pp_layout) and `mla_up_proj` again (deepseek_workload_base_configs)",
    ),
    Recipe(
        models=("kimi-k2",),
        gpus=BLACKWELL,
        changes={"again": UP_PROJECTION},
        why="`mla_up_proj` again, HybridEP, no graphs (kimi_workload_base_configs)",
    ),
    Recipe(
        models=("deepseek-v3",),
        gpus=("gb200",),
        changes={"graphed": ATTENTION_AND_ROUTER},
        why="graphs of attention, router and preprocessing",
    ),
    Recipe(
        models=("deepseek-v3",),
        gpus=("b300",),
        first="26.04.01",
        changes={"graphed": ATTENTION_AND_ROUTER},
        why="graphs of attention, router and preprocessing (issue 3385, PR 3549)",
    ),
    Recipe(
        models=("deepseek-v3",),
        gpus=("b200",),
        first="26.04.01",
        changes={"graphed": ATTENTION_AND_ROUTER, "hides_dispatch": True},
        why="the same, DeepEP and `moe_a2a_overlap` (PR 3368)",
    ),
    Recipe(
        models=("qwen3-235b",),
        gpus=RACKS,
        changes={"graphed": ATTENTION_AND_ROUTER},
        why="HybridEP, graphs of attention, router and preprocessing (qwen3_workload_base_configs)",
    ),
    Recipe(
        models=("qwen3-235b",),
        gpus=BOXES,
        changes={"dispatch": "all-to-all"},
        why="all-to-all, no graphs (qwen3_workload_base_configs)",
    ),
    Recipe(
        models=("qwen3-235b",),
        gpus=("h100",),
        changes={"hides_dispatch": True},
        why="`moe_a2a_overlap`",
    ),
    Recipe(
        models=("qwen3-235b",),
        gpus=("b300",),
        before="26.04",
        changes={"hides_dispatch": True},
        why="`moe_a2a_overlap` until PR 2706",
    ),
    Recipe(
        models=("qwen3-235b",),
        gpus=("b300",),
        first="26.04.01",
        changes={"dispatch": "nodes"},
        why="HybridEP (PR 3490)",
    ),
    Recipe(
        models=("qwen3-30b",),
        gpus=BLACKWELL,
        changes={"graphed": ROUTER},
        why="HybridEP, graphs of router and preprocessing (qwen3_workload_base_configs)",
    ),
    Recipe(
        models=("qwen3-30b",),
        gpus=("b200", "h100"),
        before="26.02.01",
        changes={"dispatch": "all-to-all"},
        why="all-to-all, whatever the recipe named (PR 2499, PR 2351)",
    ),
    Recipe(
        models=("qwen3-30b",),
        gpus=("b200",),
        first="26.02.01",
        changes={"graphed": ATTENTION_AND_ROUTER},
        why="graphs of attention, too (PR 2499)",
    ),
    Recipe(
        models=("gpt-oss",),
        gpus=("gb300", "b300"),
        changes={"graphed": ATTENTION_AND_ROUTER, "dispatch": "all-to-all"},
        why="all-to-all, graphs of attention, router and preprocessing (gpt_oss_workload_base_configs)",
    ),
    Recipe(
        models=("gpt-oss",),
        gpus=("gb200", "b200", "h100"),
        changes={"again": NORMS_AND_ACTIVATIONS, "dispatch": "all-to-all"},
        why="all-to-all, `layernorm` and `moe_act` again (gpt_oss_workload_base_configs)",
    ),
    Recipe(
        models=("gpt-oss",),
        gpus=("b200", "b300"),
        first="26.02.01",
        changes={"dispatch": "nodes"},
        why="HybridEP among 8 (PR 2915)",
    ),
    Recipe(
        models=("gpt-oss",),
        gpus=("gb200",),
        first="26.04",
        changes={"dispatch": "nodes", "hides_dispatch": True},
        why="HybridEP and `moe_a2a_overlap` (PR 2906)",
    ),
    Recipe(
        models=("gpt-oss",),
        gpus=("b300",),
        first="26.06",
        precisions=("mxfp8",),
        changes={"fused_experts": True, "hides_dispatch": True, "low_attention": True},
        why="experts' kernels fused, `moe_a2a_overlap` and attention in 8 bits (gpt_oss_workload_base_configs)",
    ),
    Recipe(
        models=("gpt-oss",),
        gpus=RACKS,
        first="26.06",
        precisions=("mxfp8",),
        changes={**WHOLE, "again": frozenset()},
        why="whole iterations as a graph, experts' kernels fused, `moe_a2a_overlap` and attention in 8 bits (PR 4173)",
    ),
    Recipe(
        models=("gpt-oss",),
        gpus=RACKS,
        first="26.06.01",
        before="26.06.02",
        precisions=("mxfp8",),
        changes={"graphed": 0.0, "fused_experts": False, "hides_dispatch": False},
        why="what 26.06 gained was lost in this release's container: steps of the 20B model 1.5 times as long (issue "
        "5028)",
    ),
    Recipe(
        models=("qwen3",),
        gpus=("gb200", "gb300", "b300"),
        first="26.06",
        precisions=("mxfp8",),
        changes=WHOLE,
        why="whole iterations as a graph, experts' kernels fused, `moe_a2a_overlap` and attention in 8 bits (PR 4249)",
    ),
    Recipe(
        models=("deepseek-v3",),
        gpus=("gb200",),
        first="26.06",
        precisions=("mxfp8",),
        changes={**WHOLE, "low_attention": False, "low_head": True},
        why="the same, the head in 8 bits and attention in 16 (PR 4226)",
    ),
    Recipe(
        models=("deepseek-v3",),
        gpus=("gb300",),
        first="26.06",
        precisions=("mxfp8",),
        changes={**WHOLE, "again": frozenset(), "low_head": True},
        why="the same, head and attention in 8 bits and nothing again (PR 3983)",
    ),
    Recipe(
        models=("deepseek-v3",),
        gpus=("b300",),
        first="26.06.01",
        precisions=("mxfp8",),
        changes={**WHOLE, "low_head": True},
        why="the same (PR 4458)",
    ),
    Recipe(
        models=("kimi-k2",),
        gpus=("gb300",),
        first="26.08",
        precisions=("mxfp8",),
        changes={**WHOLE, "again": frozenset()},
        why="the same (PR 5168)",
    ),
]


def numbers(version: str) -> tuple[int, ...]:
    """A release as a tuple of numbers, for comparison."""
    return tuple(int(each) for each in version.split("."))


def release_of(table: str) -> str | None:
    """The release in a table's name (26.04.01), or None where it has none."""
    found = re.search(r"\b(\d\d\.\d\d(?:\.\d\d)?)\b", table)
    return found[1] if found else None


def recipe_changes(source: str, table: str, model: str, gpu: str, precision: str) -> dict[str, Any]:
    """The fields of System that the recipes behind a row set; empty where no recipe is known."""
    release = release_of(table)
    found: dict[str, Any] = {}
    name, part = re.sub(r"[\s_.]+", "-", model.strip().lower()), gpu.strip().lower()
    for each in RECIPES if release else ():
        assert release is not None
        is_of = each.source in source.lower() and name.startswith(each.models) and part in each.gpus
        is_then = numbers(each.first) <= numbers(release) < numbers(each.before)
        if is_of and is_then and (not each.precisions or precision in each.precisions):
            found.update(each.changes)
    return found
