"""The report, the trace and the picture of an estimated training step."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.estimate.step import Estimate, whole_memory
from launcher.profile.picture import MEMORY, draw_memory
from launcher.profile.report import memory_json, rates_json, rows_of, top_of
from launcher.trace.roofline import least_seconds
from launcher.watch.picture import save_picture
from modeling.counts import flops_per_token

GB = 1e9
TRACE = "trace-estimate.json.gz"


def write_estimate(estimate: Estimate, out: Path) -> dict[str, Any]:
    """Writes a trace and a picture of the estimate's memory into the folder ``out``, and returns the report as JSON."""
    report = report_of(estimate)
    out.mkdir(parents=True, exist_ok=True)
    config = estimate.config
    title = f"{config.name}: memory over one micro-batch, estimated for {estimate.hardware.name}"
    figure = draw_memory(title, estimate.traced.memory, "estimated time in the micro-batch")
    save_picture(figure, out / MEMORY, "--out")
    trace = {"traceEvents": [*trace_events(estimate)], "displayTimeUnit": "ms"}
    (out / TRACE).write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode()))
    return report


def report_of(estimate: Estimate) -> dict[str, Any]:
    """The report as JSON, with the fields of a report of a measured step (launcher.profile.report)."""
    config, train = estimate.config, estimate.config.train
    tokens = train.global_batch_size * config.data.seq_len
    flops = flops_per_token(config.model, config.data.seq_len) * tokens
    peak = estimate.rates.peak[train.stored]
    seconds = {key: each.seconds for key, each in estimate.sums.items()}
    memory = memory_json(whole_memory(estimate))
    return {
        "kind": "estimated",
        "says": says(estimate, tokens, flops / estimate.seconds / (peak * estimate.world_size), memory["peak_bytes"]),
        "machine": estimate.hardware.name,
        "world_size": estimate.world_size,
        "pp_rank": estimate.pp_rank,
        "micro_batches": estimate.n_micro_batches,
        "precision": train.precision,
        "seconds": estimate.seconds,
        "micro_batch_seconds": estimate.micro_batch_seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / estimate.seconds,
        "model_flops": flops,
        "mfu": flops / estimate.seconds / (peak * estimate.world_size),
        "rates": rates_json(estimate.rates),
        "parts": rows_of(seconds, estimate.sums),
        "top": top_of({key: each.seconds for key, each in estimate.tops.items()}),
        "ranks": [],
        "memory": memory,
    }


def says(estimate: Estimate, tokens: int, mfu: float, peak_bytes: int) -> list[str]:
    """The lines of text before the table: what was estimated, from what, at which rates, and whether it fits."""
    config, gpus, hardware = estimate.config, estimate.world_size, estimate.hardware
    reached = hardware.efficiency
    where = f", pipeline position {estimate.pp_rank} (the slowest)" if config.parallel.pp > 1 else ""
    launches = sum(each.launches for each in estimate.sums.values())
    fits = "fits in" if peak_bytes < hardware.memory_gb * GB else "does NOT fit in"
    hidden = ["activations go to the host and back beside the passes"] * config.train.offload_activations
    travels = config.parallel.ep > 1 and config.parallel.ep_overlap
    hidden += ["tokens travel to experts while others are computed with"] * travels
    beside = f", but {' and '.join(hidden)}" if hidden else ""
    stages = "; a pipeline holds the activations of several" if config.parallel.pp > 1 else ""
    return [
        f"ESTIMATE, no measurement: {config.name} on {gpus} {hardware.name}{'s' if gpus > 1 else ''}, "
        f"{config.train.precision}{where}",
        f"from one micro-batch traced at true size, {estimate.n_micro_batches} of them, one document a sequence, "
        f"experts evenly loaded, and nothing overlapped{beside}",
        f"rates: data sheet x assumed shares (products {reached.products:g}, grouped {reached.grouped_products:g}, "
        f"attention {reached.attention_forward:g} and {reached.attention_backward:g}, memory {reached.memory:g}, "
        f"links {reached.links:g}), at least {hardware.launch_seconds * 1e6:g} us a kernel",
        f"{estimate.seconds * 1e3:,.0f} ms a step of {tokens:,} tokens, {tokens / estimate.seconds:,.0f} tokens/s, "
        f"MFU {mfu:.1%}; {launches:,.0f} kernels, each of which the host must launch in time",
        f"one micro-batch and all states: {peak_bytes / GB:.1f} GB, {fits} {hardware.memory_gb:g} GB{stages}",
    ]


def trace_events(estimate: Estimate) -> Iterator[dict[str, Any]]:
    """Trace events, in Perfetto's format and microseconds, of one micro-batch and then the update, without overlap."""
    name = f"estimate for {estimate.hardware.name}, no measurement"
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}}
    for thread, title in enumerate(("operations", "parts")):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": {"name": title}}
    now, begun, last = 0.0, 0.0, ""
    for op in (*estimate.traced.ops, *estimate.update):
        seconds, bound = least_seconds(op, estimate.rates)
        part = f"{op.part} {op.phase}"
        if part != last:
            if last:
                yield {"ph": "X", "name": last, "pid": 0, "tid": 1, "ts": begun * 1e6, "dur": (now - begun) * 1e6}
            begun, last = now, part
        told = {"bound": bound, "bytes": op.work.bytes, "flops": op.work.flops, "sent_bytes": op.work.sent_bytes}
        yield {
            "ph": "X", "name": op.work.name, "cat": op.part, "pid": 0, "tid": 0,
            "ts": now * 1e6, "dur": seconds * 1e6, "args": told,
        }  # fmt: skip
        now += seconds
    if last:
        yield {"ph": "X", "name": last, "pid": 0, "tid": 1, "ts": begun * 1e6, "dur": (now - begun) * 1e6}
