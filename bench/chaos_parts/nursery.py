"""A process that has imported everything once, and forks what the benchmark starts.

A rank takes some 15 seconds of processor time to import what it trains with, and this benchmark starts many. Nothing else
is saved: a forked child runs the real ``mlora_worker.__main__.main`` from its first line, in a session of its own, with an
environment of its own. The nursery has one thread and has computed nothing, so that a child inherits no lock and no pool.

Commands come as lines of JSON on standard input, ``{"start": NUMBER, "what": ..., "environment": {...}, "log": PATH}``;
answers go to standard output, ``{"started": NUMBER, "pid": PID}`` and ``{"ended": NUMBER, "code": CODE}`` with the code as
``subprocess`` has it. At the end of its input it kills its children and ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.forks import die_with_parent, end_with

_CHUNK = 65536


def main() -> None:
    answers, wakes = os.dup(sys.stdout.fileno()), _wakeup()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an import prints is no answer
    programs = _programs()
    threads = sum(1 for _ in Path("/proc/self/task").iterdir()) if sys.platform == "linux" else 1
    if threads != 1:
        raise SystemExit(f"the nursery has {threads} threads: a child would inherit their locks")
    gc.collect()
    gc.freeze()  # children need not copy what the collector would only look at
    _say(answers, {"ready": os.getpid()})
    _serve(answers, wakes, programs)


def _programs() -> Mapping[str, Callable[[], object]]:
    """What can be started. Imported here, and not above, since a child of ``subprocess`` needs none of it."""
    import boto3
    import numba.core.registry
    import transformers.models.llama.modeling_llama

    import mlora_worker.rank.start
    from bench.chaos_parts import check, operator, work
    from mlora_worker.__main__ import main as rank

    boto3.session.Session(region_name="us-east-1").client(
        "s3", aws_access_key_id="a", aws_secret_access_key="b"
    )
    numba.core.registry.cpu_target.target_context.refresh()  # as the first kernel would, which costs seconds
    for loaded in (transformers, mlora_worker.rank.start):
        assert loaded
    return {"rank": rank, "operator": operator.main, "model": work.write_model, "check": check.main}


def _serve(answers: int, wakes: int, programs: Mapping[str, Callable[[], object]]) -> None:
    children: dict[int, int] = {}  # pid -> number
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    selector.register(wakes, selectors.EVENT_READ)
    buffer = b""
    while True:
        ready = {key.fd for key, _ in selector.select()}
        if sys.stdin.fileno() in ready:
            data = os.read(sys.stdin.fileno(), _CHUNK)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                pid = _fork(command, programs)
                children[pid] = command["start"]
                _say(answers, {"started": command["start"], "pid": pid})
        if wakes in ready:
            os.read(wakes, _CHUNK)
        for pid, code in _ended(children):
            _say(answers, {"ended": children.pop(pid), "code": code})
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _fork(command: Mapping[str, Any], programs: Mapping[str, Callable[[], object]]) -> int:
    parent = os.getpid()

    def live() -> None:
        _become(command, parent)
        programs[command["what"]]()

    pid = os.fork()
    if pid == 0:
        end_with(live)
    return pid


def _become(command: Mapping[str, Any], parent: int) -> None:
    """In the child: nothing of the nursery stays but what it has imported."""
    os.setsid()
    die_with_parent()
    if os.getppid() != parent:  # it was gone before the call
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(command["environment"])
    os.chdir(Path(command["log"]).parent)


def _ended(children: Mapping[int, int]) -> list[tuple[int, int]]:
    """Children that have ended, with their codes."""
    found = []
    for pid in children:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _wakeup() -> int:
    """A descriptor that is readable after a child has ended."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def _say(answers: int, answer: Mapping[str, Any]) -> None:
    os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
