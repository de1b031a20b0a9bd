"""What only a worker or its machine can reach is no address for a task."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact


def answer(
    make: Any, endpoint: str, allowed: Any = (), contact: Contact | None = None, **settings: Any
) -> tuple[str, str]:
    task = make.task(storage={"endpoint": endpoint})
    pipeline = make.pipeline(worker={"allowedNetworks": list(allowed)})
    snapshot = make.snapshot(task, pipelines=(pipeline,), contact=contact, group=make.group())
    (status,) = decide(snapshot, make.settings(**settings), make.now).task_statuses.values()
    return status.conditions[0].reason, status.conditions[0].message


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://127.0.0.1:8333",
        "http://LocalHost:9000",
        "http://s3.localhost",
        "http://[::1]:80",
        "http://[64:ff9b::7f00:1]",
        "http://0.0.0.0",
        "http://169.254.169.254/latest",
        "http://[fe80::1]",
        "http://[fd00:ec2::254]",
        "http://100.100.100.200",
        "http://192.0.0.192",
        "http://168.63.129.16",
        "http://[fd20:ce::254]",
        "http://metadata.google.internal",
        "http://224.0.0.1",
    ],
)
def test_it_is_refused_with_its_field(make: Any, endpoint: str) -> None:
    reason, message = answer(make, endpoint)
    assert reason == "EndpointNotAllowed"
    assert message.startswith("spec.storage.endpoint: ")
    assert "spec.worker.allowedNetworks" in message


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://127.0.0.1:8333\\@s3.example.org",
        "http://s3.example.org\\@127.0.0.1",
        "http://127.1",
        "http://0x7f000001/",
        "http://0x7f.1",
        "http://0177.0.0.1",
        "http://2130706433",
        "http://s3.localhost.",
        "http://127.0.0.1.",
        "http://127\u30020.0.1",
        "http://\u24b6.example.org",
        "http://localhost%2eexample.org",
        "http://[::ffff:127.0.0.1]",
        "http://[::ffff:7f00:1]",
        "http://[0:0:0:0:0:0:0:1]",
        "http://[fe80::1%eth0]",
        "http://user@127.0.0.1:1/",
        "http://s3.example.org:",
        "http://s3.example.org:080",
        "http://s3.example.org:65536",
        "http://s3.example.org/a/../b",
        "http://s3.example.org/?a",
        "http://s3.example.org#a",
        "http://s3 .example.org",
        "http://s3.example.org\t",
        "http:/s3.example.org",
        "http:///s3.example.org",
    ],
)
def test_what_two_parsers_could_read_in_two_ways_is_no_address(make: Any, endpoint: str) -> None:
    reason, message = answer(make, endpoint, allowed=["0.0.0.0/0", "::/0"], allowPrivateEndpoints=True)
    assert reason == "InvalidSpec"
    assert "spec.storage.endpoint: " in message
    assert "such as https://s3.example.org:9000" in message


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://s3.storage:8333",
        "https://s3.eu-west-1.amazonaws.com",
        "http://10.88.0.1:8333",
        "http://192.168.1.5",
        "http://[fd12::1]",
        "https://localhost.example.org",
        "http://metadata-store:9000",
    ],
)
def test_a_store_in_the_cluster_or_in_the_world_is_not(make: Any, endpoint: str) -> None:
    assert answer(make, endpoint)[0] == "Accepted"


def test_a_pipelines_owner_may_allow_a_network(make: Any) -> None:
    assert answer(make, "http://127.0.0.1:8333", allowed=["127.0.0.0/8"])[0] == "Accepted"
    assert answer(make, "http://169.254.169.254", allowed=["127.0.0.0/8"])[0] == "EndpointNotAllowed"
    assert answer(make, "http://[::1]", allowed=["127.0.0.0/8"])[0] == "EndpointNotAllowed"


def test_where_user_and_worker_are_one_everything_is_allowed(make: Any) -> None:
    assert answer(make, "http://localhost:8333", allowPrivateEndpoints=True)[0] == "Accepted"


@pytest.mark.parametrize("phase", ["Training", "Succeeded"])
def test_a_task_that_trains_or_has_just_ended_is_left_in_peace(make: Any, phase: str) -> None:
    contact = Contact(report=make.report(make.reported(phase)))
    task = make.task(storage={"endpoint": "http://127.0.0.1"}, status={"pipeline": "team-a/toy"})
    snapshot = make.snapshot(task, contact=contact, group=make.group())
    (status,) = decide(snapshot, make.settings(), make.now).task_statuses.values()
    assert status.state == phase


def test_rows_on_the_web_are_judged_in_the_same_way(make: Any) -> None:
    task = make.task(dataset={"uri": "http://169.254.169.254/latest/meta-data"})
    (status,) = decide(make.snapshot(task), make.settings(), make.now).task_statuses.values()
    assert status.conditions[0].reason == "EndpointNotAllowed"
    assert status.conditions[0].message.startswith("spec.dataset.uri: 169.254.169.254 ")


def test_so_are_rows_to_evaluate_on(make: Any) -> None:
    task = make.task(evaluation={"uri": "http://[::1]/rows.jsonl"})
    (status,) = decide(make.snapshot(task), make.settings(), make.now).task_statuses.values()
    assert status.conditions[0].reason == "EndpointNotAllowed"
    assert status.conditions[0].message.startswith("spec.evaluation.uri: ::1 ")


def test_a_network_that_is_none_is_refused_with_its_field(make: Any) -> None:
    pipeline = make.pipeline(worker={"allowedNetworks": ["10.0.0.0/99"]})
    assert pipeline.spec is None
    assert "spec.worker.allowedNetworks[0]" in (pipeline.problem or "")


def test_a_bucket_in_the_hosts_name_is_judged_with_it(make: Any) -> None:
    storage = {"endpoint": "http://google.internal", "addressing": "virtual"}
    task = make.task(storage=storage, output={"uri": "s3://metadata/computeMetadata/v1"})
    (status,) = decide(make.snapshot(task), make.settings(), make.now).task_statuses.values()
    assert status.conditions[0].reason == "EndpointNotAllowed"
    assert "metadata.google.internal" in status.conditions[0].message
