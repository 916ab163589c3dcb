"""Settings of the allocators of a training process: glibc's heap, and torch's allocator of GPU memory."""

import ctypes
import os
import sys
from collections.abc import MutableMapping

# malloc.h
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 4 << 20  # of a block that is mapped where the heap has no room for it
TRIM_THRESHOLD_BYTES = 512 << 20  # free at the heap's end, from which on they are given back
TOP_PAD_BYTES = 128 << 10  # by which the heap grows beyond what is asked for; glibc's own
ROOM_BYTES = 256 << 20  # by which it grows once, before training
ASKED_BYTES = 1 << 20  # of the block with which it does

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads the first of them that is set


def let_segments_grow(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets torch's allocator to expandable segments, unless the user has configured it. Call it before CUDA's start."""
    if not any(name in environment for name in ALLOCATORS):
        environment[ALLOCATORS[0]] = "expandable_segments:True"


def keep_heap_from_growing() -> None:
    """Makes glibc map blocks of 4 MiB or more for which its heap has no room, and keep up to 512 MiB free at its end.

    A mapped block is returned to the system when it is freed; left alone, glibc's heap fragments and grows without
    end: the quickstart's ranks by 5 MB a step, from 1.2 to 2.2 GiB in 200 steps (2 cores, 2026-11-21). Setting the
    first threshold makes glibc return free memory at the heap's end from 128 KiB on, which the next layer then takes
    again by page faults. With 128 MiB kept a step costs 3% less, 8% with ``selective`` recomputation, and with 512 MiB
    some 2% less than that, at the same peak (docs/measurements.md).

    The room is opened at once (``open_room``). Does nothing but on Linux.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # glibc's; other C libraries have none
            libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
            libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
            open_room(libc)


def open_room(libc: ctypes.CDLL) -> None:
    """Lets the heap grow by ROOM_BYTES at once. Their pages are not written to, so they take no memory yet.

    It would never grow by itself in a run whose large blocks come when it has no room, such as with recomputation:
    these would be mapped, and written to by page faults, in every step (docs/measurements.md).
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.malloc_trim(0)  # so that the next block finds no place at the heap's end
    libc.mallopt(M_TOP_PAD, ROOM_BYTES)  # what glibc asks the system for beside a block
    libc.free(libc.malloc(ASKED_BYTES))
    libc.mallopt(M_TOP_PAD, TOP_PAD_BYTES)
