"""From StatefulSets, pods and events to worker groups, with the reason why a pod does not run. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mlora_operator.api.pipeline import KIND
from mlora_operator.manifests.names import ANNOTATION_PIPELINE, LABEL_PIPELINE, LINEAGE, REVISION, SCHEME
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.decode import key_of, parse_time
from mlora_operator.reconcile.state.snapshot import Key, Pod, ProcessEnding, WorkerGroup

Raw = Mapping[str, Any]

# What a container waits for in the ordinary course of its start.
ORDINARY = frozenset({"ContainerCreating", "PodInitializing"})
LINES_SHOWN = 3  # of a container's last words
LINE_SHOWN = 400  # characters of each


def read_groups(
    statefulsets: Iterable[Raw],
    pods: Iterable[Raw],
    events: Iterable[Raw],
    owners: Mapping[Key, str] = MappingProxyType({}),
) -> Mapping[Key, WorkerGroup]:
    """Groups by pipeline. ``events``: those that say why a StatefulSet could not make a pod. ``owners``: uids of the
    pipelines that there are. A StatefulSet of a deleted one of the name is about to go, with its pods: it is nobody's.

    Pods whose StatefulSet is gone are a group, too, until they have ended: they train, and write, to the end. Where their
    pipeline's name had to be changed for a label, the group goes by that (``names.safe_name``).
    """
    by_label: defaultdict[tuple[str, str], list[Pod]] = defaultdict(list)
    for raw in pods:
        label = raw["metadata"].get("labels", {}).get(LABEL_PIPELINE, "")
        by_label[raw["metadata"]["namespace"], label].append(_readable(raw))
    refusals = _latest(events)
    groups: dict[Key, WorkerGroup] = {}
    for raw in statefulsets:
        meta = raw["metadata"]
        name = meta.get("annotations", {}).get(ANNOTATION_PIPELINE)
        if name is None or "deletionTimestamp" in meta:
            continue
        members = by_label.pop((meta["namespace"], meta.get("labels", {}).get(LABEL_PIPELINE, "")), [])
        key = Key(meta["namespace"], name)
        uids = _owners_of(meta)
        if uids and key in owners and owners[key] not in uids:
            of_it = tuple(sorted(members, key=lambda pod: pod.key))
            groups[key] = WorkerGroup(replicas=0, revision="", pods=of_it, gone=True, former=True)
            continue
        replicas = raw["spec"].get("replicas", 1)
        refusal = refusals.get(key_of(raw)) if _still_lacks(raw, len(members), replicas) else None
        if refusal is not None and refusal.of not in (None, meta.get("uid")):
            refusal = None  # of a former one of the name
        groups[key] = WorkerGroup(
            replicas=replicas,
            revision=meta.get("annotations", {}).get(REVISION, ""),
            pods=tuple(sorted(members, key=lambda pod: pod.key)),
            problem=refusal.cause if refusal is not None else None,
            scheme=_scheme(raw, members),
        )
    for (namespace, label), members in by_label.items():
        of_it = tuple(sorted(members, key=lambda pod: pod.key))
        left = WorkerGroup(replicas=0, revision="", pods=of_it, gone=True)
        groups.setdefault(Key(namespace, label), left)
    return groups


def _owners_of(meta: Raw) -> list[str]:
    """Uids of the pipelines that it belongs to."""
    return [str(one.get("uid")) for one in meta.get("ownerReferences") or () if one.get("kind") == KIND]


class _FailedCreate(NamedTuple):
    cause: Cause
    of: str | None  # uid of the StatefulSet


def _still_lacks(raw: Raw, pods: int, replicas: int) -> bool:
    """Whether a refusal that was seen may be of its present state. Events stay: until its controller has looked at the
    present spec, and once it has made all pods, which may not be seen here yet, they are about a former state."""
    status = raw.get("status") or {}
    observed, generation = status.get("observedGeneration"), raw["metadata"].get("generation")
    if isinstance(observed, int) and isinstance(generation, int) and observed < generation:
        return False
    made = status.get("replicas")
    return max(pods, made if isinstance(made, int) else 0) < replicas


def _readable(raw: Raw) -> Pod:
    """A pod whose status cannot be read is one that does not run."""
    try:
        return read_pod(raw)
    except Exception as error:
        problem = Cause("ReadError", f"its status cannot be read ({type(error).__name__}: {error})"[:400])
        meta = raw["metadata"]
        revision = (meta.get("annotations") or {}).get(REVISION, "")
        return Pod(key_of(raw), meta["uid"], revision, ready=False, problem=problem)


def read_pod(raw: Raw) -> Pod:
    meta, status = raw["metadata"], raw.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    ready = conditions.get("Ready")
    is_ready = ready is not None and ready["status"] == "True"
    since = ready.get("lastTransitionTime") if ready is not None and is_ready else None
    deleting = "deletionTimestamp" in meta
    return Pod(
        key=key_of(raw),
        uid=meta["uid"],
        revision=meta.get("annotations", {}).get(REVISION, ""),
        ready=is_ready and not deleting,
        problem=None if is_ready else pod_problem(status),
        deleting=deleting,
        restarts=sum(one.get("restartCount", 0) for one in status.get("containerStatuses", ())),
        ended=_ending(status),
        ready_since=parse_time(since) if since else None,
        placed=conditions.get("PodScheduled", {}).get("status") == "True",
        gone_by=parse_time(meta["deletionTimestamp"]) if deleting else None,
        lineage=meta.get("annotations", {}).get(LINEAGE, ""),
        scheme=meta.get("annotations", {}).get(SCHEME, "http"),
    )


def _scheme(statefulset: Raw, members: Iterable[Pod]) -> str:
    """Of the first worker, which may be of a former template. Never found out by trying: whoever stands in for it would
    only have to refuse HTTPS to be sent keys in clear text.
    """
    for pod in members:
        if pod.key.name.endswith("-0"):
            return pod.scheme
    template = statefulset["spec"].get("template", {}).get("metadata", {})
    return str(template.get("annotations", {}).get(SCHEME, "http"))


def _ending(status: Mapping[str, Any]) -> ProcessEnding | None:
    """Of the worker's container, the only one. It may have ended just now, or before its present start."""
    for container in status.get("containerStatuses", ()):
        for state in ("state", "lastState"):
            ended = container.get(state, {}).get("terminated")
            if ended is not None:
                return ProcessEnding(ended.get("exitCode", 1), _last_words(ended))
    return None


def pod_problem(status: Mapping[str, Any]) -> Cause | None:
    """Why a pod that is not ready does not run, in the scheduler's or the kubelet's words; None while it starts.

    A container that has just ended is no problem yet: the kubelet starts it again at once. When it ends again and
    again, it waits (CrashLoopBackOff).
    """
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Cause(condition.get("reason", "Unschedulable"), condition.get("message", ""))
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting")
        ended = container.get("lastState", {}).get("terminated")
        if waiting is not None and waiting.get("reason") not in (*ORDINARY, None):
            words = _last_words(ended) if ended is not None else waiting.get("message", "")
            return Cause(waiting["reason"], words)
    if status.get("phase") == "Failed":
        return Cause(status.get("reason", "Failed"), status.get("message", ""))
    return None


def _last_words(ended: Mapping[str, Any]) -> str:
    """Exit code and message of a container that ended; the message is its log's end when it wrote none itself."""
    lines = [line.strip()[:LINE_SHOWN] for line in str(ended.get("message", "")).splitlines() if line.strip()]
    message = " / ".join(lines[-LINES_SHOWN:])
    code = f"exit code {ended.get('exitCode')}"
    if ended.get("reason") not in ("Error", "Completed", None):
        code = f"{ended['reason']}, {code}"
    return f"{code}: {message}" if message else code


def _latest(events: Iterable[Raw]) -> Mapping[Key, _FailedCreate]:
    """The newest refusal of each StatefulSet. Whoever may write events in a namespace writes what they like: one that names
    nothing is about nothing."""
    ordered = sorted(
        events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or "")
    )
    about = ((event, event.get("involvedObject") or {}) for event in ordered)
    return {
        Key(str(of["namespace"]), str(of["name"])): _FailedCreate(
            Cause(str(event.get("reason") or "FailedCreate"), str(event.get("message") or "")),
            str(of["uid"]) if of.get("uid") else None,
        )
        for event, of in about
        if of.get("kind") == "StatefulSet" and of.get("namespace") and of.get("name")
    }
