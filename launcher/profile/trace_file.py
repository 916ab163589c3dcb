"""Writes a rank's trace by torch's profiler as a file for Perfetto (https://ui.perfetto.dev), with the rank's name."""

import errno
import gzip
import json
from pathlib import Path
from typing import Any

from launcher.scratch import scratch_folder
from parallel.mesh import Mesh

COMPRESSION = 6  # level of gzip, the default of its command


def trace_name(rank: int) -> str:
    """The file name of a rank's trace."""
    return f"trace-rank-{rank}.json.gz"


def write_trace(profiler: Any, out: Path, mesh: Mesh) -> None:
    """Writes the profiler's events into ``out``, with the host process named after the rank's place on the mesh.

    Raises OSError where torch could not write them.
    """
    with scratch_folder() as folder:
        whole = folder / "trace.json"
        profiler.export_chrome_trace(str(whole))
        try:
            trace = json.loads(whole.read_text())
        except (FileNotFoundError, ValueError):  # torch reports no error where the disk is full
            raise OSError(errno.ENOSPC, "torch could not write a trace there") from None
    name_processes(trace["traceEvents"], mesh.rank, mesh.place)
    trace["distributedInfo"] = trace.get("distributedInfo", {}) | {"rank": mesh.rank, "world_size": mesh.world_size}
    data = json.dumps(trace, separators=(",", ":")).encode()
    (out / trace_name(mesh.rank)).write_bytes(gzip.compress(data, COMPRESSION))


def name_processes(events: list[dict[str, Any]], rank: int, place: str) -> None:
    """Renames the trace's processes, so that several ranks' traces, opened together, are not all called python."""
    for event in events:
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_labels"):
            field = "name" if event["name"] == "process_name" else "labels"
            event["args"] = {field: f"{place}: {event['args'].get(field, '')}".rstrip(": ")}
        if event.get("ph") == "M" and event.get("name") == "process_sort_index":
            event["args"] = {"sort_index": rank}
