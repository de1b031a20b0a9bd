"""A submission is applied whole, or not at all where that can be known before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlora_operator.cli.kube.client import KubeError
from mlora_operator.cli.kube.retry import RetryTimeouts
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.submit.applying import ApplyContext, Submitted, apply_submission
from mlora_operator.cli.submit.conflict import Step
from mlora_operator.cli.submit.manifests import Submission
from tests.fixtures.loratask import loratask

SPEC: dict[str, Any] = {"baseModel": "m", "dataset": {"uri": "s3://d/a"}, "output": {"uri": "s3://o/a"}}


def task(name: str, **spec: Any) -> dict[str, Any]:
    return loratask(name, SPEC | spec)


def other(kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}


class FakeCluster:
    """Keeps tasks by name. ``refuses`` and ``fails_once`` are names whose writes do not go well."""

    namespace = "team"

    def __init__(self) -> None:
        self.there: dict[str, dict[str, Any]] = {}
        self.log: list[str] = []
        self.refuses: dict[str, KubeError] = {}
        self.fails_once: set[str] = set()
        self.lingers = 0  # looks at a deleted task until it is gone
        self._uids = 0

    def has(self, manifest: dict[str, Any], ended: str | None = None) -> None:
        held = [{"type": ended, "status": "True"}] if ended else []
        self._uids += 1
        meta = manifest["metadata"] | {"namespace": "team", "uid": f"old-{self._uids}"}
        self.there[meta["name"]] = manifest | {"metadata": meta, "status": {"conditions": held}}

    async def find_task(self, namespace: str, name: str) -> dict[str, Any] | None:
        assert namespace == "team"
        found = self.there.get(name)
        if found is not None and "deletionTimestamp" in found["metadata"]:
            if self.lingers == 0:
                del self.there[name]
                return None
            self.lingers -= 1
        return found

    async def is_namespaced(self, manifest: dict[str, Any]) -> bool:
        return bool(manifest["kind"] != "Namespace")

    async def apply(self, manifest: dict[str, Any], *, force: bool, dry_run: bool = False) -> dict[str, Any]:
        meta = manifest["metadata"]
        name = meta["name"]
        if name in self.fails_once:
            self.fails_once.remove(name)
            raise ConnectionResetError("cut")
        self.log.append(
            f"{'try' if dry_run else 'apply'} {name} in {meta.get('namespace')}{' force' if force else ''}"
        )
        if name in self.refuses:
            raise self.refuses[name]
        self._uids += not dry_run
        return manifest | {"metadata": meta | {"uid": f"new-{self._uids}"}}

    async def try_create(self, manifest: dict[str, Any]) -> None:
        self.log.append(f"try new {manifest['metadata']['name']}")

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        self.log.append(f"delete {name} {uid} in {namespace}")
        self.there[name]["metadata"]["deletionTimestamp"] = "now"


def submit(
    cluster: FakeCluster,
    *tasks: dict[str, Any],
    others: tuple[dict[str, Any], ...] = (),
    replace: bool = False,
) -> list[Submitted]:
    time = [0.0]

    async def sleep(seconds: float) -> None:
        time[0] += seconds

    tools = ApplyContext(cluster, False, RetryTimeouts(), lambda: time[0], sleep)
    return asyncio.run(
        apply_submission(tools, Submission(tasks, others), replace=replace, say=cluster.log.append)
    )


def test_all_is_tried_before_anything_is_written_and_tasks_come_last() -> None:
    cluster = FakeCluster()
    done = submit(cluster, task("a"), task("b"), others=(other("Secret", "keys"),))
    assert cluster.log == [
        "try keys in team",
        "try a in team force",
        "try b in team force",
        "apply keys in team",
        "secret/keys applied",
        "apply a in team force",
        "loratask/a created",
        "apply b in team force",
        "loratask/b created",
    ]
    assert [(one.namespace, one.name, one.uid, one.step) for one in done] == [
        ("team", "a", "new-2", Step.CREATE),
        ("team", "b", "new-3", Step.CREATE),
    ]


def test_a_refusal_of_one_object_writes_nothing() -> None:
    cluster = FakeCluster()
    cluster.refuses["b"] = KubeError(422, "spec.training: must be less than 3", "Invalid")
    with pytest.raises(CommandError, match=r"loratask/b: spec\.training: must be less than 3") as refusal:
        submit(cluster, task("a"), task("b"))
    assert refusal.value.exit_code == 7
    assert not any(line.startswith("apply") for line in cluster.log)


def test_every_name_that_is_taken_is_told_and_nothing_is_asked_or_written() -> None:
    cluster = FakeCluster()
    cluster.has(task("a", lora={"rank": 3}))
    cluster.has(task("b", lora={"rank": 4}))
    with pytest.raises(CommandError) as refusal:
        submit(cluster, task("a"), task("b"), task("c"))
    assert "loratask/a exists" in str(refusal.value)
    assert "loratask/b exists" in str(refusal.value)
    assert cluster.log == []


def test_what_has_finished_is_not_touched() -> None:
    cluster = FakeCluster()
    cluster.has(task("a"), "Succeeded")
    (done,) = submit(cluster, task("a"))
    assert (done.step, done.uid) == (Step.KEEP, "old-1")
    assert cluster.log == ["loratask/a unchanged"]


def test_a_replaced_task_is_gone_before_the_new_one_comes() -> None:
    cluster = FakeCluster()
    cluster.has(task("a", lora={"rank": 3}))
    cluster.lingers = 3
    (done,) = submit(cluster, task("a"), replace=True)
    assert cluster.log == [
        "try new a",
        "delete a old-1 in team",
        "apply a in team force",
        "loratask/a replaced",
    ]
    assert done.uid == "new-2"


def test_a_task_that_never_goes_is_told() -> None:
    cluster = FakeCluster()
    cluster.has(task("a", lora={"rank": 3}))
    cluster.lingers = 10_000
    with pytest.raises(CommandError, match="still being deleted after 300 seconds") as refusal:
        submit(cluster, task("a"), replace=True)
    assert refusal.value.exit_code == 3


def test_objects_in_a_namespace_of_the_same_files_are_not_tried_before_it_is_there() -> None:
    cluster = FakeCluster()
    submit(cluster, task("a"), others=(other("Namespace", "team"),))
    assert [line for line in cluster.log if line.startswith("try")] == ["try team in None"]
    assert cluster.log.index("apply team in None") < cluster.log.index("apply a in team force")


def test_a_write_whose_answer_is_lost_is_written_again() -> None:
    cluster = FakeCluster()
    cluster.fails_once = {"a"}
    (done,) = submit(cluster, task("a"))
    assert done.step is Step.CREATE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KubeError(401, "Unauthorized"), 4),
        (KubeError(403, 'User "ci" cannot patch resource "loratasks"'), 4),
        (KubeError(403, "exceeded quota: tasks"), 7),
        (KubeError(404, 'namespaces "team" not found', "NotFound"), 5),
        (KubeError(409, "conflict with kubectl", "Conflict"), 7),
    ],
)
def test_each_refusal_has_its_exit_code(error: KubeError, code: int) -> None:
    cluster = FakeCluster()
    cluster.refuses["a"] = error
    with pytest.raises(CommandError) as refusal:
        submit(cluster, task("a"))
    assert refusal.value.exit_code == code
    assert str(error) in str(refusal.value)
