"""The preparation process: it holds the tokenizer, and has a process of its own do each job.

It is one thread that imports everything once and then only forks, so that a job begins at once, and its process has no
lock that another thread held. What a job does to its process (a parser that crashes, memory that it may not have, a loop)
is that job's alone. A job whose connection is closed at the rank's end is nobody's any more, and is killed; when the rank
has ended, all are, and this process ends.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

from mlora_worker.preparing import bounds
from mlora_worker.preparing.messages import Ended, ProcessAnswer, send

log = logging.getLogger(__name__)

JobWork = Callable[[socket.socket], None]

_LOOK_EVERY: Final = 0.25  # seconds, while there are jobs


@dataclass(slots=True)
class _Running:
    pid: int
    connection: socket.socket
    crowded: bool = False


class Server:
    def __init__(self, control: socket.socket, work: JobWork, clean: Callable[[], None]) -> None:
        """``control``: from the rank; ``work``: what a job's process does with its connection. ``clean`` is called when a
        job has ended without cleaning up."""
        self._control, self._work, self._clean = control, work, clean
        self._jobs: dict[int, _Running] = {}  # by pid
        limit = bounds.container_limit()
        self._most_of_one, self._most_of_all = bounds.most_of_one(limit), bounds.most_of_all(limit)
        self._own_bytes = 0  # shared with each job
        self._pid = os.getpid()

    def serve(self) -> None:
        """Until the rank has ended."""
        bounds.adopt_orphans()
        gc.collect()
        gc.freeze()  # a job's collector would else write to all pages, and so have them copied
        self._own_bytes = bounds.anonymous_bytes(self._pid)
        self._ended, wake = socket.socketpair()
        for end in (self._ended, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        while self._wait():
            self._reap()
            self._keep_to_bounds()
        for job in self._jobs.values():
            _kill(job.pid)

    def _wait(self) -> bool:
        """Until something happens. False once the rank has ended."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        by_file = {job.connection.fileno(): job for job in self._jobs.values()}
        for file in by_file:
            poll.register(file, 0)  # that it is hung up is always told
        for file, _ in poll.poll(_LOOK_EVERY * 1000 if self._jobs else None):
            if file == self._control.fileno():
                if not self._begin():
                    return False
            elif file == self._ended.fileno():
                with contextlib.suppress(BlockingIOError):
                    while self._ended.recv(64):
                        pass
            else:
                _kill(by_file[file].pid)
        return True

    def _begin(self) -> bool:
        try:
            given, files, _, _ = socket.recv_fds(self._control, 1, 1)
        except ConnectionError:
            return False
        if not given:
            return False
        for file in files:
            connection = socket.socket(fileno=file)
            try:
                pid = os.fork()
            except OSError as error:  # as if it had been killed: a further try may find the room
                log.warning("no process for a task's rows can be started: %s", error)
                self._tell(connection, Ended(status=-signal.SIGKILL, peak=0))
                continue
            if pid == 0:
                self._do(connection)
            self._jobs[pid] = _Running(pid, connection)
        return True

    def _do(self, connection: socket.socket) -> NoReturn:
        """In the job's process."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for job in self._jobs.values():
                job.connection.close()
            self._control.close()
            bounds.limit_job(self._pid, self._most_of_one)
            self._work(connection)
            code = 0
        except BaseException:
            log.exception("a job's process failed")
        finally:
            logging.shutdown()
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job = self._jobs.pop(pid, None)
            if job is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            if code:
                self._clean()
            self._tell(job.connection, Ended(status=code, peak=usage.ru_maxrss * 1024, crowded=job.crowded))

    def _tell(self, connection: socket.socket, ended: Ended) -> None:
        """To whoever still listens, which nobody does after an answer."""
        with connection, contextlib.suppress(OSError):
            send(connection, ProcessAnswer(ended=ended), flags=socket.MSG_DONTWAIT)

    def _keep_to_bounds(self) -> None:
        """Ends the largest job where all together have more than they may; looks again once it is gone."""
        if any(job.crowded for job in self._jobs.values()):
            return
        held = {pid: bounds.own_bytes(pid, self._own_bytes) for pid in self._jobs}
        if sum(held.values()) > self._most_of_all:
            largest = max(held, key=held.__getitem__)
            self._jobs[largest].crowded = True
            _kill(largest)


def _kill(pid: int) -> None:
    """With what it has started."""
    for child in bounds.children(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
