"""A task whose store is at a port that the workers' network policy does not open is told which setting opens it."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact, Key
from mlora_operator.settings import NetworkPolicySettings
from mlora_worker.protocol import Failure, FailureReason

POLICY = NetworkPolicySettings(enabled=True, operator_labels={"app": "operator"}, ports=(443, 8333))
AWAY = Failure(reason=FailureReason.STORAGE_UNREACHABLE, message="http://minio:9001 did not answer")
HINT = "does not open port 9001: ask your platform team to add it to networkPolicy.workerPorts"


def told(make: Any, policy: NetworkPolicySettings, *, of_pipeline: Any = None, **spec: Any) -> str:
    """The condition Failed of a task whose store did not answer."""
    failure = spec.pop("failure", AWAY)
    snapshot = make.snapshot(
        make.task(**spec),
        pipelines=(make.pipeline(**(of_pipeline or {})),),
        group=make.group(),
        contact=Contact(report=make.report(make.reported("Failed", failure=failure))),
    )
    settings = make.settings().model_copy(update={"network_policy": policy})
    status = decide(snapshot, settings, make.now).task_statuses[Key("team-a", "t1")]
    return next(one.message for one in status.conditions if one.type == "Failed")


@pytest.mark.parametrize(
    ("story", "spec"),
    [
        ("its store", {"storage": {"endpoint": "http://minio:9001"}}),
        ("its rows", {"dataset": {"uri": "https://data.example:9001/rows.jsonl"}}),
        ("its rows for evaluation", {"evaluation": {"uri": "http://data.example:9001/rows.jsonl"}}),
    ],
)
def test_the_port_and_the_setting_are_named(make: Any, story: str, spec: dict[str, Any]) -> None:
    message = told(make, POLICY, **spec)
    assert message.startswith(AWAY.message), story
    assert HINT in message, story


@pytest.mark.parametrize(
    ("story", "policy", "spec", "more"),
    [
        ("the port is open", POLICY, {"storage": {"endpoint": "http://s3:8333"}}, {}),
        ("the usual port is open", POLICY, {"storage": {"endpoint": "https://s3"}}, {}),
        ("there is no policy", NetworkPolicySettings(), {"storage": {"endpoint": "http://minio:9001"}}, {}),
        (
            "a rule of the platform's opens it",
            POLICY.model_copy(update={"egress": ({"ports": [{"port": 9000, "endPort": 9010}]},)}),
            {"storage": {"endpoint": "http://minio:9001"}},
            {},
        ),
        (
            "the pipeline's own store has it",
            POLICY,
            {"storage": {"endpoint": "http://minio:9001"}},
            {"of_pipeline": {"storage": {"endpoint": "http://other:9001"}}},
        ),
        (
            "the store did answer",
            POLICY,
            {"storage": {"endpoint": "http://minio:9001"}},
            {"failure": Failure(reason=FailureReason.ACCESS_DENIED, message="denied")},
        ),
    ],
)
def test_what_the_policy_has_no_part_in_is_not_blamed_on_it(
    make: Any, story: str, policy: NetworkPolicySettings, spec: dict[str, Any], more: dict[str, Any]
) -> None:
    assert "network policy" not in told(make, policy, **spec, **more), story


def test_a_task_that_waits_for_its_store_is_told_as_well(make: Any) -> None:
    task = make.task(storage={"endpoint": "http://minio:9001"})
    contact = Contact(report=make.report(make.reported("Saving", blocked=AWAY)))
    snapshot = make.snapshot(task, group=make.group(), contact=contact)
    settings = make.settings().model_copy(update={"network_policy": POLICY})
    status = decide(snapshot, settings, make.now).task_statuses[task.key]
    (message,) = [one.message for one in status.conditions if one.type == "UploadBlocked"]
    assert HINT in message
