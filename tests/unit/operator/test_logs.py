"""Log lines as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from mlora_operator.logs import configure_logging
from mlora_operator.settings import LogSettings


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_json_line_names_task_and_pipeline(stream: io.StringIO) -> None:
    configure_logging(LogSettings(format="json"), stream)
    fields = {"task": "b", "namespace": "a", "generation": 3, "pipeline": "ml/toy"}
    logging.getLogger("x").info("it %s", "runs", extra=fields)
    line = json.loads(stream.getvalue())
    assert (line["message"], line["level"], line["logger"]) == ("it runs", "info", "x")
    assert fields.items() <= line.items()
    assert line["time"].endswith("Z")


def test_an_error_is_one_json_line_with_its_trace(stream: io.StringIO) -> None:
    configure_logging(LogSettings(format="json"), stream)
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: no" in json.loads(line)["error"]


def test_a_text_line_reads_well(stream: io.StringIO) -> None:
    configure_logging(LogSettings(), stream)
    logging.getLogger("x").warning("mind the gap")
    assert stream.getvalue().rstrip().endswith("WARNING mind the gap")


@pytest.mark.parametrize(("level", "said"), [("info", False), ("debug", True)])
def test_what_kopf_says_of_every_event_is_for_debugging(stream: io.StringIO, level: str, said: bool) -> None:
    configure_logging(LogSettings.model_validate({"level": level}), stream)
    logging.getLogger("kopf.objects").info("Handler 'wake' succeeded.")
    assert bool(stream.getvalue()) is said


@pytest.mark.parametrize("style", ["json", "text"])
def test_credentials_in_addresses_are_blotted_out(stream: io.StringIO, style: str) -> None:
    configure_logging(LogSettings.model_validate({"format": style}), stream)
    try:
        raise OSError("https://host/rows.jsonl?X-Amz-Signature=deadbeef cannot be read")
    except OSError:
        logging.getLogger("x").exception("the store at http://me:pa55@s3.local:8333 is away")
    assert "http://***@s3.local:8333 is away" in stream.getvalue()
    assert not {"pa55", "deadbeef"} & set(re.findall(r"[a-z0-9]+", stream.getvalue()))


FORGED = "keys\n2026-01-01T00:00:00.000Z INFO    all is well\r\u2028\u0085\x1b[2J\x9b2J\u202e\ud800 {}"


@pytest.mark.parametrize("style", ["json", "text"])
def test_no_text_makes_a_second_record_of_one(stream: io.StringIO, style: str) -> None:
    """Names and answers of strangers are in messages and in errors."""
    configure_logging(LogSettings.model_validate({"format": style}), stream)
    logging.getLogger("x").warning("cannot read %s", FORGED)
    try:
        raise OSError(FORGED)
    except OSError:
        logging.getLogger("x").exception("cannot read %s", FORGED)
    text = stream.getvalue()
    text.encode()  # a lone surrogate could not be written
    assert not set(text) & set("\r\u2028\u0085\x1b\x9b\u202e")
    first, second, *trace = text.splitlines()
    assert "cannot read keys\\n2026" in first
    assert "cannot read keys\\n2026" in second
    assert all(line.startswith("  ") for line in trace)
    assert bool(trace) is (style == "text")
