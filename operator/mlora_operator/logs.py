"""Log lines for people (text) or for a log store (JSON).

A line about a task or a pipeline has fields that say which (``reconcile.state.log_fields``). Users, passwords and
queries of web addresses are redacted; keys of stores never come here, since the operator only passes them on. A record
is one line, and the lines of its traceback are indented: no text from outside can look like a record of its own.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from mlora_operator.settings import LogSettings
from mlora_worker.protocol import indented, one_line, without_credentials

NAMES = ("task", "namespace", "generation", "pipeline")  # extra fields of a record


class JsonLogLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str | int] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_credentials(record.getMessage()),
        }
        line |= {name: value for name in NAMES if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["error"] = without_credentials(self.formatException(record.exc_info))
        return json.dumps(line)  # in ASCII: nothing in it ends a line anywhere


class TextLogLines(logging.Formatter):
    """Time, level and message."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname:<7} {one_line(without_credentials(record.getMessage()))}"
        if not record.exc_info:
            return line
        return f"{line}\n{indented(without_credentials(self.formatException(record.exc_info)))}"


def configure_logging(settings: LogSettings, stream: TextIO = sys.stderr) -> None:
    """Send all records to ``stream``. What kopf says about every single event is kept for level debug."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLogLines() if settings.format == "json" else TextLogLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    quiet = logging.DEBUG if settings.level == "debug" else logging.WARNING
    for name in ("kopf", "aiohttp.access", "asyncio", "kubernetes"):
        logging.getLogger(name).setLevel(quiet)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
