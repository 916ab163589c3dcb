"""What a training process asks of glibc's heap, by the page faults of a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library is not glibc")

PROGRAM = """
import ctypes, resource
from launcher.training import heap

{change}
heap.keep_heap_from_growing()
heap.keep_heap_from_growing()  # a process may train twice
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def write_blocks(size: int) -> int:
    began = faults()
    blocks = [libc.malloc(size) for _ in range(8)]
    for block in blocks:
        libc.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
    return faults() - began

write_blocks({size})
print(write_blocks({size}))
"""
PAGE_BYTES = 4096


def second_faults(size: int, change: str = "") -> int:
    """The page faults of eight blocks of ``size`` bytes, written to a second time, after ``change``."""
    return int(printed(PROGRAM.format(size=size, change=change)))


def printed(program: str, **variables: str) -> str:
    """What a program prints under glibc's own malloc, with these variables and none else that changes it."""
    changing = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(changing)} | variables
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    return done.stdout


@pytest.mark.parametrize("size", [3 << 20, 20 << 20])
def test_blocks_are_written_to_again_without_page_faults(size: int) -> None:
    """Smaller and larger ones than those that are mapped where the heap has no room."""
    assert second_faults(size) < 100


@pytest.mark.parametrize("size", [64 << 20, 200 << 20])
def test_what_the_room_does_not_hold_is_given_back(size: int) -> None:
    assert second_faults(size) > size // PAGE_BYTES


def test_planted_heaps_without_room_are_seen() -> None:
    assert second_faults(20 << 20, "heap.open_room = lambda libc: None") > 8 * (20 << 20) // PAGE_BYTES
    assert second_faults(3 << 20, "heap.TRIM_THRESHOLD_BYTES, heap.open_room = 128 << 10, lambda libc: None") > 1000


def test_a_process_that_may_have_no_more_memory_goes_on() -> None:
    limit = "resource.setrlimit(resource.RLIMIT_DATA, (100 << 20, 100 << 20))"
    assert second_faults(1 << 20, limit) < 100


@pytest.mark.parametrize(
    "variables", [{}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, {"MALLOC_PERTURB_": "1"}], ids=str
)
def test_room_takes_no_memory_until_it_is_used(variables: dict[str, str]) -> None:
    """Also where pages have 2 MiB, of which each would come whole."""
    program = """
from launcher.training.cpu_room import resident_bytes
from launcher.training.heap import keep_heap_from_growing

before = resident_bytes()
keep_heap_from_growing()
print(int(resident_bytes() - before))
"""
    assert int(printed(program, **variables)) < 10 << 20
