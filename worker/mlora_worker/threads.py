"""Threads that are there before they are needed.

A pool that starts its threads at the first use starts them when work has come, and that may be when the machine has no
memory for one more: the work is then lost, or waits for ever in a queue that no thread reads. It happened to an upload that
was to be tried again just after memory had run out.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool with all its threads running. Raises RuntimeError where the machine has not so many."""
    pool = ThreadPoolExecutor(threads, name)
    here = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(here.wait)  # which occupies a thread, so that the next one needs another
    except RuntimeError:
        here.abort()
        pool.shutdown(wait=False)
        raise
    here.wait()
    return pool
