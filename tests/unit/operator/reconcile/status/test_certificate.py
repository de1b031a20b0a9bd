"""Before the certificate of a coordinator ends, its pipeline says so."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from mlora_operator.certificates import LIFETIME, end_of, self_signed
from mlora_operator.metrics.families import CERTIFICATE_END
from mlora_operator.metrics.state import LastPass, measured
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import CertificateEnd, Contact, Key, Snapshot

HERE = Key("team-a", "toy")


def snapshot(make: Any, left: timedelta | None, held: dict[str, Any] | None = None) -> Snapshot:
    contact = Contact(report=make.report())
    pipeline = make.pipeline(status=held or {})
    made: Snapshot = make.snapshot(make.task(), group=make.group(), contact=contact, pipelines=(pipeline,))
    ends = (
        {} if left is None else {pipeline.key: CertificateEnd(make.now + left, "Secret team-a/mlora-toy-tls")}
    )
    return replace(made, certificate_ends=ends)


def said(
    make: Any, left: timedelta | None, held: dict[str, Any] | None = None
) -> tuple[str, str, str] | None:
    decision = decided(make, left, held)
    (status,) = decision.pipeline_statuses.values()
    return next(
        ((one.status, one.reason, one.message) for one in status.conditions if one.type == "CertificateEnds"),
        None,
    )


def decided(make: Any, left: timedelta | None, held: dict[str, Any] | None = None) -> Decision:
    return decide(snapshot(make, left, held), make.settings(), make.now)


@pytest.mark.parametrize("left", [timedelta(days=31), None])
def test_nothing_is_said_while_it_is_far(make: Any, left: timedelta | None) -> None:
    assert said(make, left) is None


@pytest.mark.parametrize(
    ("left", "reason", "words"),
    [(timedelta(days=29), "EndsSoon", "ends at"), (timedelta(seconds=-1), "Ended", "ended at")],
)
def test_it_is_said_with_its_secret_and_what_to_do_and_as_an_event(
    make: Any, left: timedelta, reason: str, words: str
) -> None:
    found = said(make, left)
    assert found is not None
    assert found[:2] == ("True", reason)
    assert f"Secret team-a/mlora-toy-tls {words}" in found[2]
    assert "or delete the Secret" in found[2]
    (event,) = [one for one in decided(make, left).events if one.reason == reason]
    assert (event.kind, event.type) == ("LoRAPipeline", "Warning")


def test_it_is_over_when_another_one_is_there_and_stays_said_while_none_is_read(make: Any) -> None:
    held = {"conditions": [make.condition("CertificateEnds", "True", "EndsSoon")]}
    renewed = said(make, timedelta(days=90), held)
    assert renewed is not None
    assert renewed[:2] == ("False", "Renewed")
    unread = said(make, None, held)
    assert unread is not None
    assert unread[:2] == ("True", "EndsSoon")


def test_there_is_a_metric(make: Any) -> None:
    seen = LastPass(snapshot(make, timedelta(days=1)), decided(make, timedelta(days=1)), make.now)
    found = [
        one for one in measured(seen, make.settings().metrics, make.now) if one.name == CERTIFICATE_END.name
    ]
    assert [sample.value for one in found for sample in one.samples] == [
        (make.now + timedelta(days=1)).timestamp()
    ]


def test_the_end_is_that_of_the_first_certificate(make: Any) -> None:
    now: datetime = make.now.replace(microsecond=0)
    first, second = (self_signed("host", now + timedelta(days=days)).certificate for days in (0, 1))
    assert end_of(first + second) == now + LIFETIME
    assert end_of("nonsense") is None
    assert end_of("") is None
