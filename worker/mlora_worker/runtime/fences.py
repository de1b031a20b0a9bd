"""What a process that runs what a stranger wrote gives up for good before it sees that.

A sandbox within Python is a list of mistakes that nobody has made yet. Behind it stand fences of the kernel's: who breaks
out of it is in a process that can only compute. It reads none of the worker's files, neither others' rows, nor keys, nor
what is in ``/proc``; speaks to no network; and reaches no other process. A worker's pod has no rights to give up: these are
fences that any process may put around itself:

* *own user*: another user and group, where the process has the rights for that (CAP_SETUID, CAP_SETGID, and CAP_KILL for
  who has to end it). Pods of the ``restricted`` standard have not.
* *files*: Landlock (Linux 5.13). Of all files it opens Python's own and this package's alone, and none for writing. Where
  the kernel has no Landlock, system calls that open files are refused.
* *network*, *processes*: a seccomp filter (``system_calls``). Where that is not to be had, a network namespace of its own.

Each is tried, and which of them stand is told (``Fences``); a kernel that has none of them is no reason to render nothing,
since the sandbox, limits and an empty environment are there without them (``data.tokenizing.sandbox_process``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from mlora_worker.runtime.system_calls import filter_of, packed

OWN_USER, FILES, NETWORK, PROCESSES = "own user", "files", "network", "processes"
ALL: Final = (OWN_USER, FILES, NETWORK, PROCESSES)
USER: Final = 65533  # and group: nobody else's in the worker's image

_TIME_ZONES: Final = (Path("/etc/localtime"), Path("/usr/share/zoneinfo"))

# Of linux/prctl.h, linux/sched.h, linux/capability.h and linux/landlock.h; numbers of calls are those of all architectures.
_SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 4, 22, 38
_FILTER: Final = 2
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_CAPABILITIES_VERSION: Final = 0x20080522
_CAN_KILL, _CAN_SET_GROUP, _CAN_SET_USER = 5, 6, 7
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_BENEATH: Final = 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3


class Fences(NamedTuple):
    """``holds``: of ``ALL``; ``lacks``: the others, each with why."""

    holds: tuple[str, ...]
    lacks: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        held = ", ".join(self.holds) or "none"
        lacking = "; ".join(f"{name}: {why}" for name, why in self.lacks)
        return f"{held} (not {lacking})" if lacking else held


class _NoFence(Exception):
    """``str(error)`` says why it cannot stand."""


def stand(packages: Iterable[ModuleType]) -> Fences:
    """Puts all that can be put around this process, for good. Of files it opens
    only Python's own, those of ``packages``, and time zones."""
    lacks: dict[str, str] = {}
    if sys.platform != "linux":
        return Fences((), tuple((one, "only Linux has it") for one in ALL))
    libc = ctypes.CDLL(None, use_errno=True)
    readable = own_files(packages)
    _try(OWN_USER, lacks, _be_another_user, readable)
    with contextlib.suppress(_NoFence):
        _control(libc, _SET_NO_NEW_PRIVILEGES, 1)
        _control(libc, _SET_DUMPABLE, 0)
    _try(FILES, lacks, _keep_to_own_files, libc, readable)
    _try(PROCESSES, lacks, _keep_to_few_calls, libc, FILES not in lacks)
    if PROCESSES in lacks:
        _try(NETWORK, lacks, _leave_network, libc)
    else:
        lacks.pop(FILES, None)  # it opens none at all
    return Fences(tuple(one for one in ALL if one not in lacks), tuple(lacks.items()))


def tried(packages: Iterable[ModuleType]) -> Fences:
    """What ``stand`` brings about, as a child of this process sees it; which must have no threads."""
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return Fences((), tuple((one, f"no process can be started to try it ({error})") for one in ALL))
    if child == 0:
        with contextlib.suppress(BaseException):
            os.write(writing, json.dumps(stand(packages)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        told = file.read()
    os.waitpid(child, 0)
    return parsed(told.decode()) or Fences(
        (), tuple((one, "the child that tries it has ended") for one in ALL)
    )


def parsed(told: str) -> Fences | None:
    """What a process tells of its own; None where that is not to be understood."""
    try:
        holds, lacks = json.loads(told)
        return Fences(tuple(map(str, holds)), tuple((str(name), str(why)) for name, why in lacks))
    except (ValueError, TypeError):
        return None


def _try(name: str, lacks: dict[str, str], put: Any, *arguments: Any) -> None:
    try:
        put(*arguments)
    except (_NoFence, OSError, ValueError) as error:
        lacks[name] = str(error)


def own_files(packages: Iterable[ModuleType]) -> tuple[Path, ...]:
    """What it may read, as far as it is there and this user may look at it. Nothing of a worker's lies there."""
    folders = (Path(module.__file__).parent for module in (os, *packages) if module.__file__)
    return tuple(path.resolve() for path in (*folders, *_TIME_ZONES) if os.access(path, os.R_OK))


# --- a user of its own ------------------------------------------------------------------------------------------------


def _be_another_user(readable: Iterable[Path]) -> None:
    held = _capabilities()
    if not all(held >> one & 1 for one in (_CAN_SET_USER, _CAN_SET_GROUP, _CAN_KILL)):
        raise _NoFence("the worker has not the rights CAP_SETUID, CAP_SETGID and CAP_KILL")
    closed = next((path for path in readable if not all(map(_is_open_to_all, (path, *path.parents)))), None)
    if closed is not None:
        raise _NoFence(f"not everybody may read {closed}")
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)


def _capabilities() -> int:
    """That are in effect, a bit for each."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _is_open_to_all(path: Path) -> bool:
    mode = path.stat().st_mode
    return bool(mode & 0o001) if path.is_dir() else bool(mode & 0o004)


# --- files ------------------------------------------------------------------------------------------------------------


def _keep_to_own_files(libc: Any, readable: Iterable[Path]) -> None:
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        raise _NoFence(f"the kernel has no Landlock ({_last_error()})")
    files = (1 << (13 + min(version - 1, 2) + (version >= 5))) - 1  # all rights that this version knows
    connections = 0b11 if version >= 4 else 0  # TCP
    outside = 0b11 if version >= 6 else 0  # abstract sockets, signals
    size = 8 if version < 4 else 16 if version < 6 else 24
    handled = struct.pack("=QQQ", files, connections, outside)
    rules = _called(libc, _CREATE_RULESET, handled, size, 0)
    try:
        for path in readable:
            may = _READ_FILE | _READ_FOLDER if path.is_dir() else _READ_FILE
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                _called(libc, _ADD_RULE, rules, _BENEATH, struct.pack("=Qi", may, file), 0)
            finally:
                os.close(file)
        _called(libc, _RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


# --- system calls, network ---------------------------------------------------------------------------------------------


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _keep_to_few_calls(libc: Any, opens_files: bool) -> None:
    machine = os.uname().machine
    program = filter_of(machine, os.getpid(), opens_files=opens_files)
    if program is None:
        raise _NoFence(f"the numbers of system calls on {machine} are not known here")
    held = ctypes.create_string_buffer(packed(program))
    _control(libc, _SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(program), ctypes.addressof(held))))


def _leave_network(libc: Any) -> None:
    if libc.unshare(_NEW_NETWORK) and libc.unshare(_NEW_USER | _NEW_NETWORK):
        raise _NoFence(f"the worker may make no network namespace ({_last_error()})")
    # Within a user namespace it would have all rights.
    header, none = struct.pack("=Ii", _CAPABILITIES_VERSION, 0), bytes(24)
    libc.capset(header, none)


def _control(libc: Any, option: int, *values: Any) -> None:
    given = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in (*values, 0, 0, 0, 0)[:4]]
    if libc.prctl(option, *given) != 0:
        raise _NoFence(f"the kernel refuses it ({_last_error()})")


def _called(libc: Any, number: int, *values: Any) -> int:
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in values]
    result: int = libc.syscall(ctypes.c_long(number), *given)
    if result < 0:
        raise _NoFence(f"the kernel refuses it ({_last_error()})")
    return result


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
