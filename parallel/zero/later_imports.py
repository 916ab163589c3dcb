"""Importing this module imports what NumPy, torch and DeepSpeed otherwise import within their functions.

The fork server of ``parallel.processes.start`` imports it once; left to each rank, these imports took 0.04 of the 0.25
s of processor time of a small rank (2 cores, 2026-11-23). A name that another version of a library lacks is skipped:
code that needs a module still imports it itself.
"""

import contextlib
import importlib

NAMES = (
    "deepspeed.comm.mori",  # by init_distributed
    "deepspeed.module_inject.auto_ep_config",  # by DeepSpeedConfig
    "deepspeed.module_inject.auto_ep_layer",  # by DeepSpeedEngine, which asks each module whether it is one
    "deepspeed.moe.ep_count",
    "encodings.idna",  # by sockets, for host names
    "numpy.ma",  # by numpy.unique
    "pydantic.dataclasses",  # by TypeAdapter
    "torch._subclasses.schema_check_mode",  # by dispatch modes of ZeRO 3's parameters
    "torch.profiler._cupti_monitor",
)

for _name in NAMES:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
