"""``python -m mlora_worker.data.tokenizing.sandbox_process``: renders one task's own chat template, harms only itself.

Reads from standard input: the template and the time that it is to be told, then conversations, as JSON; writes to standard
output an answer to each, and ends when its input does. ``sandboxed_template`` starts it. Every message is framed by its
length in bytes.

Whatever a template makes Python do happens within bounds that the kernel keeps: memory, processor time of one rendering
(a signal that ends the process) and of all, no files, no processes; and behind fences that it has put around itself, which
its first answer tells (``runtime.fences``). It imports little, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import jinja2
import markupsafe
from jinja2.exceptions import TemplateError

import mlora_worker
from mlora_worker.data.tokenizing.sandbox import InvalidTemplate, TaskTemplate, characters_of
from mlora_worker.runtime.fences import stand

PACKAGES: Final = (jinja2, markupsafe, mlora_worker)  # whose modules it may import, beside Python's own
HEADER: Final = struct.Struct("<Q")
READY, TEXT, REFUSED, INVALID = b"r", b"t", b"e", b"i"  # the first byte of an answer
LONGEST_ERROR: Final = 1000  # characters

MOST_MEMORY: Final = 512 * 2**20  # bytes beyond what the process has before it sees the template
RENDERING_SECONDS: Final = 5.0  # processor time of one rendering
ALL_SECONDS: Final = 7200  # and of all
_LAST_SECONDS: Final = 10  # after those

# A task's renderings may take this on average, which is many times what templates of models take, and this to begin with.
_FIRST_SECONDS: Final = 60.0
_SECONDS_A_RENDERING: Final = 0.005
_SECONDS_A_CHARACTER: Final = 1e-7


def main() -> None:
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    _warm_up()
    limit_itself()
    _write(answers, READY, json.dumps(stand(PACKAGES)))
    given = _read(asked)
    if given is None:
        return
    source, now = given
    _begin_clock()
    try:
        template = TaskTemplate(source, datetime.fromisoformat(now) if now is not None else None)
    except InvalidTemplate as error:
        _write(answers, INVALID, _words(error))
        return
    _write(answers, READY, "")
    allowed = _FIRST_SECONDS
    while (conversations := _read(asked)) is not None:
        for messages, names in conversations:
            allowed += _SECONDS_A_RENDERING + _SECONDS_A_CHARACTER * characters_of(messages, names)
            kind, text = _rendered(template, messages, names, allowed)
            _write(answers, kind, text)


def _warm_up() -> None:
    """Whatever is imported at its first use is imported before no file can be opened any more."""
    template = TaskTemplate(
        "{% for m in messages %}{{ m | tojson }}{{ strftime_now('%B %Z') }}{{ m.x.y }}{% endfor %}"
    )
    with contextlib.suppress(TemplateError):
        template.render([{"role": "user", "content": "x"}])
    with contextlib.suppress(InvalidTemplate):
        TaskTemplate("{% endfor %}")
    datetime.fromisoformat("2026-01-01T00:00:00+00:00").astimezone()


def limit_itself() -> None:
    """For good: a process cannot raise what it has lowered."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 16),
        # At the soft limit SIGXCPU ends it. Were that the hard one, too, it would be a SIGKILL, as for want of memory.
        (resource.RLIMIT_CPU, ALL_SECONDS),
        (resource.RLIMIT_AS, _memory() + MOST_MEMORY),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        last = most + _LAST_SECONDS if what == resource.RLIMIT_CPU else most
        with contextlib.suppress(ValueError, OSError):  # a system that knows no such limit
            resource.setrlimit(what, (most, last if hard == resource.RLIM_INFINITY else min(last, hard)))
    with contextlib.suppress(OSError):  # where memory runs out all the same, this process is the first to go
        Path("/proc/self/oom_score_adj").write_text("1000")


def _memory() -> int:
    """Bytes of address space."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**40


def _begin_clock() -> None:
    """SIGPROF, which nothing handles, ends the process when the time is over, also in the midst of a long operation."""
    signal.setitimer(signal.ITIMER_PROF, RENDERING_SECONDS)


def _rendered(template: TaskTemplate, messages: Any, names: Any, allowed: float) -> tuple[bytes, str]:
    used = time.process_time()
    if used > allowed:
        return REFUSED, (
            f"its renderings have taken {used:.0f} s of processor time, far more than these conversations need: look "
            f"for nested loops"
        )
    _begin_clock()
    try:
        return TEXT, template.render(messages, **names)
    except TemplateError as error:
        return REFUSED, _words(error)


def _words(error: Exception) -> str:
    try:
        words = str(error)
    except Exception:  # it may be of the template's own making
        words = "it rejects the conversation"
    return words if len(words) <= LONGEST_ERROR else f"{words[:LONGEST_ERROR]}..."


def _read(file: BinaryIO) -> Any:
    """None at the end."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    written = file.read(size)
    return json.loads(written) if len(written) == size else None


def _write(file: BinaryIO, kind: bytes, text: str) -> None:
    written = kind + text.encode(errors="backslashreplace")
    file.write(HEADER.pack(len(written)))
    file.write(written)
    file.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main()
    os._exit(0)  # values nested too deeply are not taken apart
