"""A task's own chat template, rendered in a process of its own, so that nothing that it does can reach another task.

The process knows no key and no token, has bounds and fences that it set itself before it saw the template
(``sandbox_process``), and ends with ``close``. Its death within those bounds is a refusal like any other that
a template gives; one that the machine may be the cause of is ``Interrupted``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from jinja2.exceptions import TemplateError

import mlora_worker
from mlora_worker.data.errors import Interrupted
from mlora_worker.data.tokenizing import sandbox_process as process
from mlora_worker.data.tokenizing.sandbox import InvalidTemplate, characters_of, check_source, longest_text
from mlora_worker.protocol import FailureReason
from mlora_worker.runtime.fences import Fences, parsed

_PROGRAM: Final = (sys.executable, "-P", "-m", process.__name__)
_START_SECONDS: Final = 120.0
# On the clock. The process ends by itself after fewer seconds of processor time, which a busy machine takes longer to give.
_ANSWER_SECONDS: Final = 60.0
_LONGEST_FENCES: Final = 8192  # bytes of what it tells of its fences
_REQUEST_CHARACTERS: Final = 500_000  # of conversations that are sent together
_KEPT_NAMES: Final = (
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "TZ",
)

Conversation = Sequence[Mapping[str, Any]]
Asked = tuple[Conversation, Mapping[str, Any]]  # with the names that the template is given


class _Ended(Exception):
    """``str(error)`` says why there is no answer."""


class OwnTemplate:
    """As ``TaskTemplate``, for one thread. ``close`` it."""

    def __init__(self, source: str, now: datetime | None = None) -> None:
        """``now``: as in ``TaskTemplate``. Raises InvalidTemplate; Interrupted and OSError where no process can be
        started."""
        check_source(source)
        self._ended: str | None = None
        self._process = subprocess.Popen(
            _PROGRAM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        self._received = bytearray()
        try:
            self._compile(source, now)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def render(self, messages: Conversation, **names: Any) -> str:
        """Raises TemplateError, Interrupted."""
        (text,) = self.render_all([(messages, names)])
        if isinstance(text, TemplateError):
            raise text
        return text

    def render_all(self, asked: Sequence[Asked]) -> list[str | TemplateError]:
        """One text or refusal for each. Where the process has ended, all that follows is refused for the same cause. Raises
        Interrupted where the machine may be that cause."""
        answers: list[str | TemplateError] = []
        try:
            for request in _requests(asked):
                self._write(request)
                for messages, names in request:
                    answers.append(self._answer(longest_text(characters_of(messages, names))))
        except _Ended as error:
            answers += [TemplateError(str(error))] * (len(asked) - len(answers))
        except Interrupted as error:
            raise Interrupted(error.reason, f"the chat template cannot be applied: {error}") from None
        return answers

    def close(self) -> None:
        """Again and again, if you like."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._ended = self._ended or "its process has ended"

    def _compile(self, source: str, now: datetime | None) -> None:
        try:
            _, answer = self._receive(_START_SECONDS, _LONGEST_FENCES)
            self.fences = parsed(answer) or Fences((), ())
        except (_Ended, Interrupted) as error:
            raise Interrupted(
                FailureReason.INTERNAL_ERROR, f"the process for a chat template does not start: {error}"
            ) from None
        try:
            self._write([source, now.isoformat() if now is not None else None])
            kind, words = self._receive(_ANSWER_SECONDS, 4 * process.LONGEST_ERROR)
        except _Ended as error:
            raise InvalidTemplate(f"cannot be compiled: {error}") from None
        if kind == process.INVALID:
            raise InvalidTemplate(words)

    def _answer(self, longest: int) -> str | TemplateError:
        kind, text = self._receive(_ANSWER_SECONDS, 4 * longest)
        return text if kind == process.TEXT else TemplateError(text)

    def _write(self, value: Any) -> None:
        written = json.dumps(value, default=str, ensure_ascii=False).encode(errors="surrogatepass")
        waiting = memoryview(process.HEADER.pack(len(written)) + written)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while waiting:
            self._wait(self._to, select.POLLOUT, deadline)
            try:
                waiting = waiting[os.write(self._to, waiting) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._end() from None

    def _receive(self, seconds: float, most: int) -> tuple[bytes, str]:
        """Kind and text of an answer, of ``most`` bytes."""
        deadline = time.monotonic() + seconds
        (size,) = process.HEADER.unpack(self._read(process.HEADER.size, deadline))
        if not 1 <= size <= 1 + most:
            raise self._end("it writes a text that is much longer than the conversation")
        answer = self._read(size, deadline)
        return answer[:1], answer[1:].decode(errors="replace")

    def _read(self, size: int, deadline: float) -> bytes:
        while len(self._received) < size:
            self._wait(self._from, select.POLLIN, deadline)
            part = os.read(self._from, 2**18)
            if not part:
                raise self._end()
            self._received += part
        read = bytes(self._received[:size])
        del self._received[:size]
        return read

    def _wait(self, file: int, event: int, deadline: float) -> None:
        if self._ended is not None:
            raise _Ended(self._ended)
        poll = select.poll()
        poll.register(file, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            # It ends by itself when it computes for long: so it was given no time to, or it is stopped.
            raise _interrupted(self._end(f"it did not respond within {_ANSWER_SECONDS:.0f} s"))

    def _end(self, why: str | None = None) -> _Ended | Interrupted:
        """Ends the process. ``why``: None where it has ended by itself."""
        if why is not None:
            self._process.kill()
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:  # it closed its output, and lives
            self._process.kill()
            code = self._process.wait()
        self._ended = why or _cause(code)
        ended = _Ended(self._ended)
        return _interrupted(ended) if why is None and code == -signal.SIGKILL else ended


def _interrupted(ended: Exception) -> Interrupted:
    return Interrupted(FailureReason.INVALID_ROW, str(ended))


def _cause(code: int) -> str:
    """In a user's words, why the process ended."""
    if code == -signal.SIGPROF:
        return (
            f"one rendering took more than {process.RENDERING_SECONDS:.0f} s of processor time: look for nested "
            f"loops and for searches in long lists"
        )
    if code == -signal.SIGXCPU:
        return (
            f"all renderings together took more than {process.ALL_SECONDS:,} s of processor time: make the template "
            "simpler, or train on fewer rows"
        )
    if code == -signal.SIGKILL:
        return (
            "its process was killed, most likely because it ran out of memory: look for lists and texts "
            "that grow in loops"
        )
    ending = signal.Signals(-code).name if -code in {*signal.Signals} else f"code {code}"
    return (
        f"it broke the process that renders it ({ending}): look for values that contain themselves, and for lists and "
        f"texts that grow in loops"
    )


def _requests(asked: Sequence[Asked]) -> Iterator[list[Asked]]:
    """Few at a time, so that the process needs little memory for conversations."""
    request: list[Asked] = []
    characters = 0
    for one in asked:
        request.append(one)
        characters += 1000 + characters_of(*one)
        if characters >= _REQUEST_CHARACTERS:
            yield request
            request, characters = [], 0
    if request:
        yield request


def _environment() -> dict[str, str]:
    """Nothing that is secret: a worker's own names hold keys."""
    kept = {name: os.environ[name] for name in _KEPT_NAMES if name in os.environ}
    root = Path(mlora_worker.__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):  # there, Python finds it by itself
        kept["PYTHONPATH"] = os.pathsep.join(
            _distinct([str(root), *kept.get("PYTHONPATH", "").split(os.pathsep)])
        )
    return kept


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, names)))
