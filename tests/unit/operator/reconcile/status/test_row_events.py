"""Rows that were cut are news once."""

from __future__ import annotations

from typing import Any

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.decision import Event
from mlora_operator.reconcile.state.snapshot import Contact
from mlora_worker.protocol import DataCounts


def events(make: Any, truncated: int, status: dict[str, Any] | None = None, **training: int) -> list[Event]:
    task = make.task(training=training, **({"status": status} if status is not None else {}))
    told = make.reported("Prepared", data=DataCounts(rows=10, used=9, truncated=truncated))
    snapshot = make.snapshot(task, group=make.group(), contact=Contact(report=make.report(told)))
    decision = decide(snapshot, make.settings(), make.now)
    return [one for one in decision.events if one.reason == "RowsTruncated"]


def test_a_user_hears_how_many_rows_were_cut(make: Any) -> None:
    (event,) = events(make, 3, maxSeqLength=64)
    assert event.type == "Warning"
    assert event.message.startswith(
        "3 of 9 rows are longer than training.maxSeqLength (64 tokens) and were cut"
    )


def test_nothing_is_said_where_no_row_was_cut(make: Any) -> None:
    assert events(make, 0) == []


def test_it_is_said_once(make: Any) -> None:
    known = {"pipeline": "team-a/toy", "data": {"rows": 10, "used": 9, "truncated": 3}}
    assert events(make, 3, known) == []
