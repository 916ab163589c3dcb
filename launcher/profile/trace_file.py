"""A rank's trace as a file that Perfetto opens (https://ui.perfetto.dev): torch's, with the rank's name in it."""

import errno
import gzip
import json
from pathlib import Path
from typing import Any

from launcher.scratch import scratch_folder
from parallel.mesh import Mesh

COMPRESSION = 6  # of gzip, as its own command has it


def trace_name(rank: int) -> str:
    """The file of a rank."""
    return f"trace-rank-{rank}.json.gz"


def write_trace(profiler: Any, out: Path, mesh: Mesh) -> None:
    """Writes the profiler's events, each rank's host process named by its place."""
    with scratch_folder() as folder:
        whole = folder / "trace.json"
        profiler.export_chrome_trace(str(whole))
        try:
            trace = json.loads(whole.read_text())
        except (FileNotFoundError, ValueError):  # torch passes over what a full disk does not take
            raise OSError(errno.ENOSPC, "torch could not write a trace there") from None
    name_processes(trace["traceEvents"], mesh.rank, mesh.place)
    trace["distributedInfo"] = trace.get("distributedInfo", {}) | {"rank": mesh.rank, "world_size": mesh.world_size}
    data = json.dumps(trace, separators=(",", ":")).encode()
    (out / trace_name(mesh.rank)).write_bytes(gzip.compress(data, COMPRESSION))


def name_processes(events: list[dict[str, Any]], rank: int, place: str) -> None:
    """Renames the processes: traces of several ranks, opened together, are otherwise all called python."""
    for event in events:
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_labels"):
            field = "name" if event["name"] == "process_name" else "labels"
            event["args"] = {field: f"{place}: {event['args'].get(field, '')}".rstrip(": ")}
        if event.get("ph") == "M" and event.get("name") == "process_sort_index":
            event["args"] = {"sort_index": rank}
