"""The preparation process as a rank holds it: started early, started again when it has ended."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import mlora_worker
from mlora_worker.data.errors import Interrupted
from mlora_worker.preparing import bounds
from mlora_worker.preparing.errors import error_of
from mlora_worker.preparing.messages import ProcessAnswer, Ready, Setup, receive, send
from mlora_worker.protocol import FailureReason

log = logging.getLogger(__name__)

_COMMAND: Final = (sys.executable, "-P", "-m", "mlora_worker.preparing")
_START_SECONDS: Final = 300.0


class ProcessHandle:
    """For many threads."""

    def __init__(self, command: Sequence[str] = _COMMAND) -> None:
        """``command``: followed by the number of its end of the control connection."""
        self._command = command
        self._lock = threading.Lock()  # guards all below
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._setup: Setup | None = None
        self._ready: Ready | None = None

    @property
    def pid(self) -> int | None:
        with self._lock:
            return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Returns at once: it imports for seconds. Raises OSError where no process can be started."""
        with self._lock:
            self._start()

    def set_up(self, setup: Setup) -> Ready:
        """Returns once jobs can be done, which are done as ``setup`` says from now on. Raises DataError for a folder
        without a usable tokenizer; Interrupted and OSError where the machine has no room for the process."""
        with self._lock:
            self._setup, self._ready = setup, None
            return self._get_ready()

    def hand_over(self, connection: socket.socket) -> None:
        """The process does the job that comes through ``connection``, which may be closed here then. Raises Interrupted and
        OSError where there is no process and none can be started."""
        with self._lock:
            if self._ready is not None and not self._hands_over(connection):
                log.warning("the preparation process has ended and is restarted")
                self._end()
            if self._ready is None:
                try:
                    self._get_ready()
                except Exception as error:  # it was ready before: no task's doing
                    raise _not_started(error) from error
                if not self._hands_over(connection):
                    raise _not_started("it ended immediately")

    def close(self) -> None:
        """Ends the process, and all jobs with it."""
        with self._lock:
            self._end()

    # --- with the lock held -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._process is not None:
            return
        control, other = socket.socketpair()
        with other:
            try:
                self._process = subprocess.Popen(
                    [*self._command, str(other.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=_environment(),
                    pass_fds=[other.fileno()],
                    start_new_session=True,  # a terminal's Ctrl-C is for the rank
                )
            except BaseException:
                control.close()
                raise
        self._control = control

    def _get_ready(self) -> Ready:
        assert self._setup is not None
        self._start()
        assert self._control is not None
        try:
            self._control.settimeout(_START_SECONDS)
            with contextlib.suppress(ConnectionError):
                send(self._control, self._setup)
            heard = receive(self._control)
            self._control.settimeout(None)
        except TimeoutError:
            heard = None
        answer = ProcessAnswer.model_validate_json(heard[0]) if heard is not None else None
        if answer is None or answer.ready is None:
            self._end()
            if answer is not None and answer.failed is not None:
                raise error_of(answer.failed, "the tokenizer needs more memory than is available")
            raise _not_started("it ended, or did not respond")
        self._ready = answer.ready
        return self._ready

    def _hands_over(self, connection: socket.socket) -> bool:
        assert self._process is not None
        assert self._control is not None
        try:
            socket.send_fds(self._control, [b"j"], [connection.fileno()])
        except OSError:
            return False
        return self._process.poll() is None

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._control = self._ready = None


def _not_started(why: object) -> Interrupted:
    return Interrupted(
        FailureReason.INTERNAL_ERROR, f"rank 0 cannot start the process that prepares rows: {why}"
    )


def _environment() -> Mapping[str, str]:
    """The rank's own: proxies and certificates are looked for there. No task's key ever is in it."""
    root = str(Path(mlora_worker.__file__).resolve().parent.parent)
    path = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        **bounds.environment(),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path))),
    }
