"""The benchmark's end of the nursery: processes that it starts, signals and hears the end of."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_START_WITHIN = 600.0  # seconds for all imports, on a machine that is busy

OnEnd = Callable[["Process"], None]


@dataclass(eq=False)
class Process:
    """``code`` is None while it runs, else as ``subprocess`` has it."""

    what: str
    log: Path
    on_end: OnEnd | None = None
    pid: int = 0
    code: int | None = None
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def send(self, number: signal.Signals) -> None:
        """Nothing happens when it has ended: its number is not given away before the nursery has said so."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Starter(Protocol):
    """Whoever starts processes."""

    def start(
        self, what: str, environment: Mapping[str, str], log: str, on_end: OnEnd | None = None
    ) -> Process: ...


class Processes:
    """A context manager around the nursery. ``on_end`` of a process is called by a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[int, Process] = {}
        self._count = 0

    def __enter__(self) -> Processes:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "nursery.log").open("wb") as log:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "bench.chaos_parts.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("MLORA_")},
                    **THREADS,
                },
            )
        self._ready = threading.Event()
        threading.Thread(target=self._listen, name="nursery", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._nursery.stdin is not None
        self._nursery.stdin.close()
        try:
            self._nursery.wait(10)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()

    def wait_ready(self) -> None:
        """Until it has imported everything. Raises RuntimeError when it cannot."""
        if not self._ready.wait(_START_WITHIN) or self._nursery.poll() is not None:
            raise RuntimeError(
                f"the nursery did not start: {(self._folder / 'nursery.log').read_text()[-2000:]}"
            )

    def start(
        self, what: str, environment: Mapping[str, str], log: str, on_end: OnEnd | None = None
    ) -> Process:
        """Start one; returns once it has a process id."""
        process = Process(what, self._folder / log, on_end)
        inherited = {
            name: os.environ[name] for name in ("PATH", "HOME", "XDG_CACHE_HOME") if name in os.environ
        }
        with self._lock:
            self._count += 1
            self._known[self._count] = process
            command = {
                "start": self._count,
                "what": what,
                "environment": {**inherited, **THREADS, **environment},
                "log": str(process.log),
            }
            assert self._nursery.stdin is not None
            self._nursery.stdin.write(json.dumps(command) + "\n")
            self._nursery.stdin.flush()
        if not process.started.wait(60):
            raise RuntimeError("the nursery starts nothing any more")
        return process

    def run(self, what: str, environment: Mapping[str, str], log: str, seconds: float = 300.0) -> None:
        """Start one and wait for its end. Raises RuntimeError unless it was a good one."""
        process = self.start(what, environment, log)
        if not process.ended.wait(seconds) or process.code != 0:
            raise RuntimeError(f"{what} ended with {process.code}: {process.log.read_text()[-2000:]}")

    def _listen(self) -> None:
        assert self._nursery.stdout is not None
        for line in self._nursery.stdout:
            answer = json.loads(line)
            if "ready" in answer:
                self._ready.set()
            elif "started" in answer:
                process = self._known[answer["started"]]
                process.pid = answer["pid"]
                process.started.set()
            else:
                process = self._known.pop(answer["ended"])
                process.code = answer["code"]
                process.ended.set()
                if process.on_end is not None:
                    threading.Thread(target=process.on_end, args=(process,), daemon=True).start()
        self._ready.set()  # it has ended: nobody shall wait for it
