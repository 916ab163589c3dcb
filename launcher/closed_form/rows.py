"""Rows of published measurements as jobs: dims, layout and batch, and the measured seconds and bytes."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.closed_form.architecture import Architecture, CannotPlan, architecture_of, positive
from launcher.closed_form.own_memory import Ours
from launcher.closed_form.recipes import recipe_changes
from launcher.closed_form.systems import System, changes_by_words, system_of
from launcher.errors import UserError

# selective: attention's core is recomputed; elementwise, feed_forward: modes of Roundtable (docs/speed.md)
Recompute = Literal["none", "selective", "elementwise", "feed_forward", "full"]
Precision = Literal["bf16", "fp8", "mxfp8", "fp4", "fp32"]
Schedule = Literal["1f1b", "interleaved", "zb-1p", "zb-2p", "dualpipe"]
GIB = 2.0**30
# Assumed for natural routing where a row does not say; no published row with known dims has natural routing.
NATURAL_IMBALANCE = 1.5


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training step on a number of GPUs."""

    architecture: Architecture
    system: System
    gpu: str
    n_gpus: int
    per_node: int
    interconnect: str
    dp: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    zero: int
    shard: int  # ranks over which ZeRO cuts; at most dp x cp
    recompute: Recompute
    precision: Precision
    schedule: Schedule
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    natural_routing: bool = False
    scaled_fp16: bool = False
    is_own_fp8: bool = False  # fp8 as in docs/fp8.md: weights are cast in every pass, experts' gradients are 16-bit
    keeps_cut_weights: bool = False  # under is_own_fp8: weights are cast once a step
    n_flushes: int = 1  # times in a step that the pipeline runs empty
    imbalance: float = 1.0  # rows of the busiest rank of ep, over the mean
    ours: Ours | None = None  # further properties of a Roundtable config; None for a published row

    @property
    def n_micro_batches(self) -> float:
        """Micro-batches of a rank in a step."""
        return max(1.0, self.global_batch_size / (self.dp * self.micro_batch_size))

    @property
    def expert_shard(self) -> float:
        """Ranks over which ZeRO shards an expert: in a Roundtable config all that hold it, those of tp included."""
        holders = max(1.0, self.dp * self.cp * self.tp / self.ep)
        return holders if self.ours is not None else min(self.shard, holders)

    @property
    def tokens(self) -> int:
        """The number of tokens in a step."""
        return self.global_batch_size * self.seq_len

    @property
    def kind(self) -> str:
        """The kind of row: "dense", "MoE natural" (by the router) or "MoE forced" (routing forced to be even)."""
        if not self.architecture.n_experts:
            return "dense"
        return "MoE natural" if self.natural_routing else "MoE forced"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines. Raises UserError naming the file and the line that is no JSON object."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError([f"--rows={path} must be text in UTF-8, a JSON object a line"]) from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UserError([f"--rows={path}, line {number} must be a JSON object, as in docs/plan-table.md"])
        rows.append(row)
    return rows


def part(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A row's object of this name; empty where it has none."""
    found = row.get(name)
    return found if isinstance(found, Mapping) else {}


def number(value: Any) -> float | None:
    """The value as a float if it is a finite number above 0, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None


def job_of(row: Mapping[str, Any]) -> Job:
    """The job of a row. Raises CannotPlan, with the reason, where what is missing cannot be inferred."""
    model, hw, layout, batch = (part(row, name) for name in ("model", "hw", "layout", "batch"))
    seq_len, n_gpus = positive(model, "seq"), positive(hw, "count")
    size = positive(batch, "global_seqs")
    for key, value in {"model.seq": seq_len, "hw.count": n_gpus, "batch.global_seqs": size}.items():
        if value is None:
            raise CannotPlan(f"{key} is not known")
    assert seq_len is not None and n_gpus is not None and size is not None
    tp, cp = positive(layout, "tp") or 1, positive(layout, "cp") or 1
    architecture = architecture_of(model, positive(layout, "pp") or 1)
    pp = positive(layout, "pp") or inferred_pp(architecture, n_gpus, tp * cp)
    dp = positive(layout, "dp") or max(1, n_gpus // (tp * pp * cp))
    micro = positive(batch, "micro") or positive(layout, "mbs")
    vpp = positive(layout, "vpp") or (1 if micro else usual_vpp(architecture.n_layers, pp))
    zero, shard = zero_of(layout.get("zero"), dp * cp)
    words = " ".join(str(each or "") for each in (row.get("notes"), layout.get("routing"), layout.get("balance")))
    return Job(
        architecture=architecture,
        system=system_of_row(row),
        gpu=str(hw.get("gpu") or ""),
        n_gpus=n_gpus,
        per_node=min(positive(hw, "per_node") or 8, n_gpus),
        interconnect=str(hw.get("interconnect") or ""),
        dp=dp,
        tp=tp,
        pp=min(pp, architecture.n_layers),
        vpp=vpp,
        cp=cp,
        ep=(positive(layout, "ep") or usual_ep(architecture, dp * cp * tp)) if architecture.n_experts else 1,
        zero=zero,
        shard=shard,
        recompute=recompute_of(layout.get("recompute")),
        precision=precision_of(layout.get("precision")),
        schedule=schedule_of(layout.get("schedule"), vpp),
        seq_len=seq_len,
        global_batch_size=size,
        micro_batch_size=micro or usual_micro(size / dp, pp, seq_len / tp),
        natural_routing=is_natural(words),
        n_flushes=flushes_of(str(row.get("notes") or "")),
        imbalance=imbalance_of(layout, words) if architecture.n_experts else 1.0,
        scaled_fp16="fp16" in str(layout.get("precision") or "").lower(),
    )


def system_of_row(row: Mapping[str, Any]) -> System:
    """The training system of a row: its source's, changed by its recipe, and then by the row's own words."""
    model, hw, layout = (part(row, name) for name in ("model", "hw", "layout"))

    def text(of: Mapping[str, Any], name: str) -> str:
        return str(of.get(name) or "")

    source, technique = text(row, "source"), text(layout, "technique")
    changes = recipe_changes(
        source, text(row, "table"), text(model, "name"), text(hw, "gpu"), precision_of(layout.get("precision"))
    )
    travel = f"{text(layout, 'dispatcher')} {text(layout, 'kernels')}"
    changes.update(changes_by_words(travel, text(row, "notes"), text(layout, "recompute")))
    n_further = positive(model, "mtp")
    if n_further is not None:
        changes["n_further"] = n_further
    return system_of(source, technique, changes)


def inferred_pp(architecture: Architecture, n_gpus: int, others: int) -> int:
    """The fewest pipeline positions with which a rank holds its parameters, 18 bytes each, in 60 GB; 1 if none do."""
    for pp in sorted(each for each in range(1, architecture.n_layers + 1) if architecture.n_layers % each == 0):
        if n_gpus % (pp * others) == 0 and 18 * architecture.parameters / (others * pp) < 60e9:
            return pp
    return 1


def usual_ep(architecture: Architecture, most: int) -> int:
    """The degree of ep where a row does not say: the largest that divides both the experts and the ranks."""
    return math.gcd(architecture.n_experts, most)


def usual_micro(per_rank: float, pp: int, seq_len: float) -> int:
    """The micro-batch size where a row does not say: 1 in a pipeline, else up to 8,192 tokens on a rank of tp."""
    size = 1
    while pp == 1 and per_rank % (2 * size) == 0 and 2 * size * seq_len <= 8192:
        size *= 2
    return size


def usual_vpp(n_layers: int, pp: int) -> int:
    """Stages of a position where a row gives neither them nor the micro-batch: stages of about two layers."""
    return max(1, n_layers // pp // 2) if pp > 1 else 1


def zero_of(value: Any, replicas: int) -> tuple[int, int]:
    """ZeRO's stage and the ranks over which it shards. FSDP is stage 3; a distributed optimizer is stage 1."""
    text = str(value if value is not None else 1).lower()
    fsdp = re.search(r"fsdp\s*(\d*)|full_shard", text)
    if fsdp:
        return 3, min(replicas, int(fsdp[1])) if fsdp[1] else replicas
    stage = re.match(r"\D*([0-3])", text)
    within = re.search(r"shard in (\d+)", text)
    return int(stage[1]) if stage else 1, min(replicas, int(within[1])) if within else replicas


def recompute_of(value: Any) -> Recompute:
    """The recomputation mode of a row; recomputing norms and activations alone costs little and counts as none."""
    text = str(value or "none").lower()
    if text.startswith(("full", "block", "uniform", "true")):
        return "full"
    return "selective" if text.startswith(("selective", "core", "attn")) else "none"


def precision_of(value: Any) -> Precision:
    """The precision of the matrix products of a row; bf16 where it does not say."""
    text = str(value or "bf16").lower()
    for word, precision in {"fp4": "fp4", "mx": "mxfp8", "8": "fp8", "fp32": "fp32", "tf32": "fp32"}.items():
        if word in text and not (word == "8" and "fp8" not in text and "float8" not in text):
            return precision  # type: ignore[return-value]
    return "bf16"


def schedule_of(value: Any, vpp: int) -> Schedule:
    """The pipeline schedule of a row; 1f1b, or interleaved with several stages a position, where it does not say."""
    text = str(value or "").lower()
    if text.startswith("dualpipe"):
        return "dualpipe"
    if text.startswith(("zb", "zero")):
        return "zb-2p" if "2p" in text or "h2" in text or text == "zbv" else "zb-1p"
    return "interleaved" if vpp > 1 or text.endswith("-i") or "interleav" in text else "1f1b"


def flushes_of(notes: str) -> int:
    """How often the pipeline runs empty in a step: once for each local batch, counted in the row's notes."""
    found = re.search(r"\bGA (\d+), local batch \d+", notes)
    return int(found[1]) if found else 1


def is_natural(words: str) -> bool:
    """Whether the row's words say that routing was natural, rather than forced to be even."""
    text = words.lower()
    if "natural" in text.split():
        return True
    return bool(re.search(r"natural (routing|balance)|no force|not force|unforced|without force", text))


def imbalance_of(layout: Mapping[str, Any], words: str) -> float:
    """Rows of the busiest rank of ep over the mean: as stated, else NATURAL_IMBALANCE for natural routing, else 1."""
    stated = number(layout.get("imbalance"))
    if stated is not None:
        return max(1.0, stated)
    return NATURAL_IMBALANCE if is_natural(words) else 1.0


def measured_seconds(row: Mapping[str, Any]) -> float | None:
    """Measured seconds of a step: stated, else from tokens/s, else from TFLOP/s by the source's formula; else None."""
    measured, derived = part(row, "measured"), part(row, "derived")
    seconds = number(measured.get("step_s"))
    if seconds is not None:
        return seconds
    speed, n_gpus = number(measured.get("tokens_per_s_per_gpu")), number(part(row, "hw").get("count"))
    size, seq_len = number(part(row, "batch").get("global_seqs")), number(part(row, "model").get("seq"))
    if speed and n_gpus and size and seq_len:
        return size * seq_len / (speed * n_gpus)
    return number(derived.get("step_s_from_formula")) or number(derived.get("step_s"))


def measured_bytes(row: Mapping[str, Any]) -> float | None:
    """The measured peak of memory in bytes, or None; ``mem_gb`` is taken for GiB, as torch and nvidia-smi count."""
    held = number(part(row, "measured").get("mem_gb"))
    return None if held is None else held * GIB


def ran_out(row: Mapping[str, Any]) -> bool:
    """Whether the row says that the run was out of memory."""
    return row.get("kind") == "oom" or part(row, "measured").get("oom") is True
