"""The operator's view of the world goes through a socket: nothing is lost on the way, errors neither."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench.chaos_parts.api import ApiServer
from bench.chaos_parts.control import Control
from bench.chaos_parts.operator import RemoteCluster
from mlora_operator.reconcile.ports import Gone
from mlora_operator.reconcile.state.decision import DesiredWorkers
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Pod, Task, WorkerGroup

PIPELINE, TASK = Key("chaos", "tiny"), Key("chaos", "one")


class FakeKubelet:
    def __init__(self) -> None:
        self.token, self.url = secrets.token_hex(4), "http://127.0.0.1:1"
        self.replicas = 0
        self.deleted: list[str] = []

    def group(self) -> WorkerGroup | None:
        return WorkerGroup(self.replicas, "1") if self.replicas else None

    def resize(self, replicas: int) -> None:
        self.replicas = replicas

    def delete(self, uid: str) -> None:
        self.deleted.append(uid)


@pytest.fixture
def api() -> ApiServer:
    return ApiServer()


@pytest.fixture
def kubelet() -> FakeKubelet:
    return FakeKubelet()


@pytest.fixture
def cluster(api: ApiServer, kubelet: FakeKubelet) -> Iterator[RemoteCluster]:
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket may not be long
        path = Path(folder) / "control"
        control = Control(path, api, kubelet, PIPELINE)
        yield RemoteCluster(str(path))
        control.close()


def pipeline() -> Pipeline:
    return Pipeline(PIPELINE, "uid", datetime.now(UTC), 1, None)


def task(uid: str, version: str) -> Task:
    return Task(TASK, uid, datetime.now(UTC), 1, None, version=version)


def test_what_is_there_comes_through(api: ApiServer, kubelet: FakeKubelet, cluster: RemoteCluster) -> None:
    api.create("LoRATask", TASK, {"baseModel": "tiny"})
    api.put_secret(Key("chaos", "store"), {"key": "value"})
    assert [raw["spec"] for raw in cluster.objects().tasks] == [{"baseModel": "tiny"}]
    assert cluster.objects().groups == {}
    asyncio.run(cluster.apply_workers(DesiredWorkers(pipeline(), 2)))
    assert cluster.objects().groups == {PIPELINE: WorkerGroup(2, "1")}
    assert asyncio.run(cluster.read_secret(Key("chaos", "store"))) == {"key": "value"}
    assert asyncio.run(cluster.read_secret(Key("chaos", "other"))) is None
    assert asyncio.run(cluster.read_token(pipeline())) == kubelet.token
    asyncio.run(cluster.delete_pod(Pod(TASK, "pod-uid", "1", True)))
    assert kubelet.deleted == ["pod-uid"]


def test_a_late_write_and_one_about_another_object_are_refused(
    api: ApiServer, cluster: RemoteCluster
) -> None:
    uid = api.create("LoRATask", TASK, {})
    [seen] = cluster.objects().tasks
    now = seen["metadata"]["resourceVersion"]
    asyncio.run(cluster.patch_task_status(task(uid, now), {"step": 1}))
    with pytest.raises(RuntimeError, match="modified"):
        asyncio.run(cluster.patch_task_status(task(uid, now), {"step": 0}))
    with pytest.raises(Gone):
        asyncio.run(cluster.patch_task_status(task("another", now), {"step": 0}))
    assert [raw["status"] for raw in api.of_kind("LoRATask")] == [{"step": 1}]
