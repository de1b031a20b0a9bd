"""Why a pod does not run, from what Kubernetes wrote into its status."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from mlora_operator.reconcile.state.pods import pod_problem, read_groups, read_pod
from mlora_operator.reconcile.state.snapshot import Key, ProcessEnding


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}, **more}]}


@pytest.mark.parametrize(
    ("story", "status", "reason", "words"),
    [
        (
            "the image is not there",
            waiting("ImagePullBackOff", 'Back-off pulling "x"'),
            "ImagePullBackOff",
            "Back-off",
        ),
        (
            "a key of a Secret is missing",
            waiting("CreateContainerConfigError", 'secret "s" not found'),
            "CreateContainerConfigError",
            'secret "s" not found',
        ),
        (
            "no room",
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes",
                    }
                ]
            },
            "Unschedulable",
            "0/3 nodes",
        ),
        (
            "the worker ends at once: its own words",
            waiting(
                "CrashLoopBackOff",
                "back-off 10s restarting",
                lastState={
                    "terminated": {"exitCode": 1, "reason": "Error", "message": "0\n1\n\n2\nno model\n"}
                },
            ),
            "CrashLoopBackOff",
            "exit code 1: 1 / 2 / no model",
        ),
        (
            "killed for memory",
            waiting("CrashLoopBackOff", lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            "CrashLoopBackOff",
            "OOMKilled, exit code 137",
        ),
        (
            "evicted",
            {"phase": "Failed", "reason": "Evicted", "message": "low on disk"},
            "Evicted",
            "low on disk",
        ),
    ],
)
def test_a_problem_has_the_kubelets_words(story: str, status: Any, reason: str, words: str) -> None:
    found = pod_problem(status)
    assert found is not None, story
    assert (found.reason, words in found.message) == (reason, True)


@pytest.mark.parametrize(
    "status",
    [
        {},
        waiting("ContainerCreating"),
        waiting("PodInitializing"),
        {"containerStatuses": [{"state": {"running": {}}}]},
        {"containerStatuses": [{"state": {"terminated": {"exitCode": 75}}}]},
    ],
)
def test_an_ordinary_start_is_no_problem(status: Any) -> None:
    assert pod_problem(status) is None


def statefulset(name: str = "mlora-toy", **meta: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "a",
            "name": name,
            "uid": "s",
            "labels": {"mlora.dev/pipeline": "toy"},
            "annotations": {"mlora.dev/pipeline-name": "toy", "mlora.dev/revision": "r2"},
            **meta,
        },
        "spec": {"replicas": 2},
    }


def pod(number: int, ready: bool = True, namespace: str = "a") -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": namespace,
            "name": f"mlora-toy-{number}",
            "uid": f"p{number}",
            "labels": {"mlora.dev/pipeline": "toy"},
            "annotations": {"mlora.dev/revision": "r1"},
        },
        "status": {"conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def event(message: str, at: str) -> dict[str, Any]:
    return {
        "involvedObject": {"kind": "StatefulSet", "namespace": "a", "name": "mlora-toy"},
        "reason": "FailedCreate",
        "message": message,
        "lastTimestamp": at,
    }


def test_a_group_has_the_pods_of_its_own_namespace() -> None:
    groups = read_groups([statefulset()], [pod(1, ready=False), pod(0), pod(0, namespace="b")], [])
    group = groups[Key("a", "toy")]
    assert [one.key.namespace for one in groups[Key("b", "toy")].pods] == ["b"]
    assert [one.key.name for one in group.pods] == ["mlora-toy-0", "mlora-toy-1"]
    assert (group.replicas, group.revision, group.ready) == (2, "r2", 1)
    assert {one.revision for one in group.pods} == {"r1"}


def test_pods_that_cannot_even_be_made_are_explained_by_the_newest_event() -> None:
    events = [event("exceeded quota: new", "2026-03-01T12:00:02Z"), event("old", "2026-03-01T12:00:01Z")]
    lacking = read_groups([statefulset()], [pod(0)], events)[Key("a", "toy")]
    assert lacking.problem is not None
    assert lacking.problem.message == "exceeded quota: new"
    whole = read_groups([statefulset()], [pod(0), pod(1)], events)[Key("a", "toy")]
    assert whole.problem is None


NEW = {"generation": 7}


@pytest.mark.parametrize(
    ("story", "status", "uid", "counts"),
    [
        ("its controller looked at the present spec", {"observedGeneration": 7, "replicas": 1}, "s", True),
        ("it has not looked yet", {"observedGeneration": 6, "replicas": 1}, "s", False),
        ("all pods are made, and not seen here yet", {"observedGeneration": 7, "replicas": 2}, "s", False),
        (
            "the event is of a former one of the name",
            {"observedGeneration": 7, "replicas": 1},
            "other",
            False,
        ),
        ("nothing is said of either", {}, None, True),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_a_refusal_of_a_former_state_does_not_count(
    story: str, status: dict[str, Any], uid: str | None, counts: bool
) -> None:
    raw = statefulset(**NEW) | {"status": status}
    told = event("exceeded quota", "2026-03-01T12:00:02Z")
    if uid is not None:
        told["involvedObject"]["uid"] = uid
    group = read_groups([raw], [pod(0)], [told])[Key("a", "toy")]
    assert (group.problem is not None) == counts, story


def owned(uid: str) -> list[dict[str, Any]]:
    return [{"kind": "LoRAPipeline", "name": "toy", "uid": uid, "controller": True}]


def test_the_statefulset_of_a_deleted_pipeline_is_not_its_successors() -> None:
    raw = statefulset(ownerReferences=owned("old"))
    former = read_groups([raw], [pod(0)], [], {Key("a", "toy"): "new"})[Key("a", "toy")]
    assert (former.former, former.gone, former.replicas, len(former.pods)) == (True, True, 0, 1)
    for owners in ({Key("a", "toy"): "old"}, {Key("a", "other"): "new"}, {}):
        assert not read_groups([raw], [pod(0)], [], owners)[Key("a", "toy")].former
    orphan = read_groups([statefulset()], [pod(0)], [], {Key("a", "toy"): "new"})[Key("a", "toy")]
    assert (orphan.former, orphan.replicas) == (False, 2)


def test_of_a_group_that_is_being_deleted_only_its_pods_are_left() -> None:
    ending = statefulset(deletionTimestamp="2026-03-01T12:00:00Z")
    for statefulsets in ([ending], []):
        group = read_groups(statefulsets, [pod(0)], [])[Key("a", "toy")]
        assert (group.replicas, group.gone) == (0, True)
        assert [one.key.name for one in group.pods] == ["mlora-toy-0"]
    assert read_groups([ending], [], []) == {}


def test_a_pod_says_how_often_it_was_started_and_how_it_ended() -> None:
    status = {
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-03-01T12:00:00Z"}],
        "containerStatuses": [
            {
                "restartCount": 3,
                "state": {"running": {}},
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "step 7"}},
            }
        ],
    }
    pod = read_pod({"metadata": {"namespace": "team-a", "name": "mlora-toy-0", "uid": "u"}, "status": status})
    assert (pod.restarts, pod.ready_since) == (3, datetime(2026, 3, 1, 12, tzinfo=UTC))
    assert pod.ended == ProcessEnding(137, "OOMKilled, exit code 137: step 7")


@pytest.mark.parametrize(
    ("story", "code", "cause", "final"),
    [
        ("an exception", 1, True, False),
        ("killed, such as for memory", 137, True, False),
        ("the model cannot be served", 2, True, True),
        ("it only lost its peer", 75, False, False),
        ("it was asked to end", 143, False, False),
        ("it ended in order", 0, False, False),
    ],
)
def test_what_an_exit_code_tells(story: str, code: int, cause: bool, final: bool) -> None:
    ending = ProcessEnding(code, "")
    assert (ending.is_cause, ending.is_final) == (cause, final), story


@pytest.mark.parametrize(
    ("story", "of_pod", "of_template", "scheme"),
    [
        ("both plain", {}, {}, "http"),
        ("a pod of a former operator", {}, {"mlora.dev/scheme": "https"}, "http"),
        ("it encrypts", {"mlora.dev/scheme": "https"}, {"mlora.dev/scheme": "https"}, "https"),
        ("it was switched off, the pod is not replaced yet", {"mlora.dev/scheme": "https"}, {}, "https"),
        ("the first pod is not there", None, {"mlora.dev/scheme": "https"}, "https"),
    ],
)
def test_a_coordinator_is_spoken_to_as_its_own_pod_serves(
    story: str, of_pod: dict[str, str] | None, of_template: dict[str, str], scheme: str
) -> None:
    owner = statefulset()
    owner["spec"]["template"] = {"metadata": {"annotations": of_template}}
    pods = [pod(1)]
    pods[0]["metadata"]["annotations"] = {"mlora.dev/scheme": "http"}  # is no coordinator
    if of_pod is not None:
        first = pod(0)
        first["metadata"]["annotations"] = of_pod
        pods.append(first)
    assert read_groups([owner], pods, [])[Key("a", "toy")].scheme == scheme, story
