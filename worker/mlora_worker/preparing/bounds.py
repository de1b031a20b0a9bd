"""What the processes that prepare rows may take of the machine, so that those that train hardly notice them.

*Processor.* A job begins at a lower priority, so that a few rows are ready soon though all cores train. Once it has
computed for ``MODEST_SECONDS`` it is large, and gets what nobody else wants (``SCHED_IDLE``, to which the kernel gives the
lowest I/O priority, too).

*Memory.* One job may have ``most_of_one`` bytes more than at its start, by a limit that the kernel keeps. All together,
their templates' processes included, may have ``most_of_all``: the server looks, and ends the largest. Where memory runs out
all the same, they go before a rank does.

*Threads.* Of the tokenizer: ``tokenizer_threads``. Numerical libraries get one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

MODEST_NICE: Final = 10
MODEST_SECONDS: Final = 3.0  # of processor time
_LOWEST_NICE: Final = 19
_MOST_OF_ONE: Final = 2**30  # bytes
_MOST_OF_ALL: Final = 2 * 2**30  # bytes
_SHARE_OF_ALL: Final = 4  # of a container's limit at most a quarter
_LEAST_OF_ONE: Final = 384 * 2**20  # bytes
_OOM_SCORE: Final = "900"  # of 1000; a template's process has that
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def tokenizer_threads() -> int:
    """Few, so that large machines prepare quickly and small ones keep a core for what trains."""
    return max(1, min(4, usable_cores() // 4))


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, str]:
    """Of the process, beside what it inherits."""
    threads = tokenizer_threads()
    one = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_IO_THREADS")
    return {
        **dict.fromkeys(one, "1"),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "TRANSFORMERS_VERBOSITY": "error",  # it would say that there is no torch
        "RUST_BACKTRACE": "0",  # of the tokenizer, where it finds no memory
    }


def container_limit() -> int | None:
    """Bytes of memory that the container may have; None without a limit."""
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such hierarchy, or "max"
            return int(path.read_text())
    return None


def most_of_all(limit: int | None) -> int:
    """Bytes of all jobs together. ``limit``: of the container."""
    return _MOST_OF_ALL if limit is None else max(_LEAST_OF_ONE, min(_MOST_OF_ALL, limit // _SHARE_OF_ALL))


def most_of_one(limit: int | None) -> int:
    """Bytes that a job may have beyond those at its start."""
    return min(_MOST_OF_ONE, most_of_all(limit))


# --- what a process does to itself --------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """What a job leaves behind when it is killed, such as a template's process, becomes a child of this one."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def lift_limits() -> None:
    """A rank with a memory budget limits itself for what it computes; what it starts inherits that."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def limit_job(parent: int, most: int) -> None:
    """In a job's process, before it knows what to do. It ends with ``parent``, and may have ``most`` bytes more."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before the call
            os._exit(1)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _figures(os.getpid(), "status").get("VmData", 2**60) + most
    if hard == resource.RLIM_INFINITY or wanted < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    _be_modest()


def _be_modest() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, MODEST_NICE)

    def step_back(*_: Any) -> None:
        for pid in (os.getpid(), *children(os.getpid())):
            let_others_go_first(pid)

    signal.signal(signal.SIGPROF, step_back)
    signal.setitimer(signal.ITIMER_PROF, MODEST_SECONDS)


def let_others_go_first(pid: int) -> None:
    """All threads of the process; those that they start inherit it."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), _LOWEST_NICE)
                os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


# --- what is seen of others ---------------------------------------------------------------------------------------


def children(pid: int) -> Iterator[int]:
    """Of all its threads."""
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            yield from map(int, file.read_text().split())


def own_bytes(pid: int, inherited: int = 0) -> int:
    """Resident bytes of a job that are no file's, with its children's; ``inherited``: those of the process that it was
    forked from, which they share. 0 where it has ended."""
    own = max(0, anonymous_bytes(pid) - inherited)
    return own + sum(anonymous_bytes(child) for child in children(pid))


def anonymous_bytes(pid: int) -> int:
    return _figures(pid, "status").get("RssAnon", 0)


def _figures(pid: int, file: str) -> dict[str, int]:
    """Bytes by name."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        return {
            name: int(value.split()[0]) * 1024
            for name, _, value in (line.partition(":") for line in lines)
            if value.endswith("kB")
        }
    return {}
