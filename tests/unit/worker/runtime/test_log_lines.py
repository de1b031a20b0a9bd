"""A rank's log lines say whom they are about."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlora_worker.protocol import Dataset, LoRAConfig, StorageAccess, TaskPlan, Training
from mlora_worker.runtime.log_lines import about, fields_of, set_up_logging

log = logging.getLogger("mlora_worker.somewhere")


def plan(name: str) -> TaskPlan:
    return TaskPlan(
        uid=f"uid-{name}", namespace="team-a", name=name, generation=3, base_model="m", lora=LoRAConfig(),
        dataset=Dataset(inline="{}"), training=Training(), output_uri="s3://b/p",
        storage=StorageAccess.model_validate({"accessKey": "AKIA", "secretKey": "topsecret"}),
    )  # fmt: skip


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


OF_A = {"task": "a", "namespace": "team-a", "generation": 3, "pipeline": "ml/toy", "rank": 1}


def test_what_is_logged_during_work_on_a_task_bears_its_name(stream: io.StringIO) -> None:
    set_up_logging("json", 1, "ml/toy", stream)
    with about(plan("a")):
        log.info("one")
        with about(plan("b")):
            log.info("two")
        log.info("three")
    log.info("four")
    one, two, three, four = lines(stream)
    assert OF_A.items() <= one.items()
    assert two["task"] == "b"
    assert three["task"] == "a"
    assert not {"task", "namespace", "generation"} & four.keys()
    assert (four["pipeline"], four["message"]) == ("ml/toy", "four")


def test_threads_of_a_pool_keep_their_tasks_apart(stream: io.StringIO) -> None:
    set_up_logging("json", 1, "ml/toy", stream)

    def work(number: int) -> None:
        with about(plan(f"t{number}")):
            log.info("work of t%d", number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(20)))
    found = lines(stream)
    assert len(found) == 20
    assert all(line["message"] == f"work of {line['task']}" for line in found)


def test_a_line_itself_may_say_whom_it_is_about_and_never_with_keys(stream: io.StringIO) -> None:
    set_up_logging("json", 1, "ml/toy", stream)
    log.warning("it leaves", extra=fields_of(plan("a")))
    with about(plan("a")):
        try:
            raise OSError("no")
        except OSError:
            log.exception("failed")
    first, second = lines(stream)
    assert OF_A.items() <= first.items()
    assert "OSError: no" in second["error"]
    assert "topsecret" not in stream.getvalue()


@pytest.mark.parametrize("style", ["json", "text"])
def test_keys_that_a_store_sends_back_and_those_in_addresses_are_blotted_out(
    stream: io.StringIO, style: Any
) -> None:
    set_up_logging(style, 1, "ml/toy", stream)
    with about(plan("a")):
        log.warning("the store says: <Key>AKIA</Key> topsecret is wrong")
        try:
            raise OSError("http://me:pa55@s3.local:8333/b?X-Amz-Signature=deadbeef&x=1 is away")
        except OSError:
            log.exception("cannot read 'https://host/rows.jsonl?token=deadbeef'")
    log.info("read s3://bucket/what?is=this and https://user@host/x")
    log.info("read https://user:dead@beef@host/x?a='deadbeef'&sig=deadbeef now")
    text = stream.getvalue()
    assert "the store says: <Key>***</Key> *** is wrong" in text
    assert "http://***@s3.local:8333/b?*** is away" in text
    assert "https://host/rows.jsonl?***'" in text
    assert "s3://bucket/what?is=this and https://***@host/x" in text  # a key of a bucket may have such a name
    for secret in ("AKIA", "topsecret", "pa55", "deadbeef"):
        assert secret not in text


def test_text_lines_are_for_people(stream: io.StringIO) -> None:
    set_up_logging("text", 1, "ml/toy", stream)
    log.warning("mind the gap")
    assert "rank 1 WARNING mlora_worker.somewhere: mind the gap" in stream.getvalue()


FORGED = "keys\n2026-01-01T00:00:00.000Z INFO    all is well\r\u2028\u0085\x1b[2J\x9b2J\u202e\ud800 {}"


@pytest.mark.parametrize("style", ["json", "text"])
def test_no_text_makes_a_second_record_of_one(stream: io.StringIO, style: Any) -> None:
    """Names and answers of strangers are in messages and in errors."""
    set_up_logging(style, 1, "ml/toy", stream)
    log.warning("cannot read %s", FORGED)
    try:
        raise OSError(FORGED)
    except OSError:
        log.exception("cannot read %s", FORGED)
    text = stream.getvalue()
    text.encode()  # a lone surrogate could not be written
    assert not set(text) & set("\r\u2028\u0085\x1b\x9b\u202e")
    first, second, *trace = text.splitlines()
    assert "cannot read keys\\n2026" in first
    assert "cannot read keys\\n2026" in second
    assert all(line.startswith("  ") for line in trace)
    assert bool(trace) is (style == "text")
