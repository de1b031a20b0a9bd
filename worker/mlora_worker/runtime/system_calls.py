"""Which system calls a process that runs what a stranger wrote may make: a program for the kernel's seccomp filter.

What such a process has to do is little: compute, take memory, read what it is asked, write what it answers, read Python's
modules. So what it may do is listed, and all else is refused as if the process had no right to it (EPERM): sockets, new
processes, other processes, mounts, changes of files. It may send a signal to itself alone, as ``abort`` does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

# Of linux/audit.h, and numbers of asm/unistd.h, by what os.uname() calls the machine.
_ARCHITECTURES: Final[Mapping[str, tuple[int, Mapping[str, int]]]] = {
    "x86_64": (
        0xC000003E,
        {
            "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
            "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
            "pread64": 17, "readv": 19, "writev": 20, "access": 21, "sched_yield": 24, "mremap": 25, "madvise": 28,
            "getitimer": 36, "setitimer": 38, "getpid": 39, "exit": 60, "kill": 62, "getcwd": 79, "readlink": 89,
            "gettimeofday": 96, "getrusage": 98, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107,
            "getegid": 108, "sigaltstack": 131, "gettid": 186, "tkill": 200, "time": 201, "futex": 202,
            "getdents64": 217, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "exit_group": 231,
            "tgkill": 234, "openat": 257, "newfstatat": 262, "readlinkat": 267, "faccessat": 269,
            "set_robust_list": 273, "getrandom": 318, "statx": 332, "rseq": 334, "faccessat2": 439,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "getcwd": 17, "faccessat": 48, "openat": 56, "close": 57, "getdents64": 61, "lseek": 62, "read": 63,
            "write": 64, "readv": 65, "writev": 66, "pread64": 67, "ppoll": 73, "readlinkat": 78, "newfstatat": 79,
            "fstat": 80, "exit": 93, "exit_group": 94, "futex": 98, "set_robust_list": 99, "getitimer": 102,
            "setitimer": 103, "clock_gettime": 113, "clock_getres": 114, "sched_yield": 124, "restart_syscall": 128,
            "kill": 129, "tkill": 130, "tgkill": 131, "sigaltstack": 132, "rt_sigaction": 134,
            "rt_sigprocmask": 135, "rt_sigreturn": 139, "times": 153, "getrusage": 165, "gettimeofday": 169,
            "getpid": 172, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178, "brk": 214,
            "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233, "getrandom": 278,
            "statx": 291, "rseq": 293, "faccessat2": 439,
        },
    ),
}  # fmt: skip
_OPENS: Final = frozenset({"openat"})
_SIGNALS: Final = frozenset({"kill", "tkill", "tgkill"})

# Of linux/bpf_common.h and linux/seccomp.h.
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data; the argument's lower half
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
_INSTRUCTION: Final = struct.Struct("=HBBI")


class Instruction(NamedTuple):
    """``then`` and ``otherwise``: how many instructions to skip."""

    code: int
    value: int
    then: int = 0
    otherwise: int = 0


def filter_of(machine: str, pid: int, *, opens_files: bool) -> tuple[Instruction, ...] | None:
    """The filter for the process ``pid`` on a ``machine``; None for one whose numbers are not known here.

    ``opens_files``: whether it may open files at all; which ones, other fences say.
    """
    known = _ARCHITECTURES.get(machine)
    if known is None:
        return None
    architecture, numbers = known
    allowed = [
        number
        for name, number in numbers.items()
        if name not in _SIGNALS and (opens_files or name not in _OPENS)
    ]
    to_itself = [numbers[name] for name in sorted(_SIGNALS)]
    # Both jump behind all comparisons, where there is: refuse; load, compare and refuse; allow.
    program = [
        Instruction(_LOAD, _ARCHITECTURE),
        Instruction(_IF_EQUAL, architecture, 1, 0),
        Instruction(_RETURN, _REFUSE),
        Instruction(_LOAD, _NUMBER),
    ]
    left = len(allowed) + len(to_itself)
    for number in to_itself:
        left -= 1
        program.append(Instruction(_IF_EQUAL, number, left + 1))
    for number in allowed:
        left -= 1
        program.append(Instruction(_IF_EQUAL, number, left + 4))
    program += [
        Instruction(_RETURN, _REFUSE),
        Instruction(_LOAD, _FIRST_ARGUMENT),
        Instruction(_IF_EQUAL, pid, 1, 0),
        Instruction(_RETURN, _REFUSE),
        Instruction(_RETURN, _ALLOW),
    ]
    return tuple(program)


def packed(program: Iterable[Instruction]) -> bytes:
    """As ``struct sock_filter[]``."""
    return b"".join(
        _INSTRUCTION.pack(one.code, one.then, one.otherwise, one.value & 0xFFFFFFFF) for one in program
    )
