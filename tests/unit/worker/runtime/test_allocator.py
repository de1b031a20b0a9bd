"""The allocator's settings, seen in the page faults of a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# A block of 40 MiB is above glibc's own threshold each time, and below the heap's after the call.
SCRIPT = """
import ctypes, resource, sys
from mlora_worker.runtime.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.malloc.argtypes, libc.memset.argtypes = [ctypes.c_size_t], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
size = 40 * 2**20
def use():
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="these are glibc's settings")
def test_memory_that_was_freed_is_used_again_without_page_faults() -> None:
    faults = {
        mode: int(
            subprocess.run(
                [sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True
            ).stdout
        )
        for mode in ("default", "kept")
    }
    assert faults["kept"] < 200
    assert faults["default"] > 10 * max(1, faults["kept"])
