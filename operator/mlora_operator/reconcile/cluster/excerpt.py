"""Of an object that the API server sends, what the operator reads. Pure.

Kubernetes bounds an object's annotations (256 KiB), but neither its labels nor the whole, except by what its store takes:
1.5 MB, which may be six times as much as JSON. Whoever may make an object can fill it, so what nobody here reads is dropped
as it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlora_operator.api import pipeline, task
from mlora_operator.api.spec_size import oversized
from mlora_operator.manifests.names import (
    ANNOTATION_PIPELINE,
    CATALOGUE_HASH,
    LABEL_PIPELINE,
    LINEAGE,
    REPLICA_HASH,
    REPLICA_NUMBER,
    REPLICA_OF,
    RETRY,
    REVISION,
    SCHEME,
)
from mlora_operator.reconcile.state.decode import TOO_LARGE

Raw = Mapping[str, Any]

# More is no name, hash or retry of anybody's; a text that was cut equals none that was not.
LONGEST_TEXT = 1024  # characters
LONGEST_WORDS = 4096  # of a kubelet: what a container may write as its last words
MOST_ENTRIES = 64  # conditions and containers of a pod; owners
ANNOTATIONS = (
    ANNOTATION_PIPELINE,
    CATALOGUE_HASH,
    LINEAGE,
    REPLICA_HASH,
    REPLICA_NUMBER,
    REPLICA_OF,
    RETRY,
    REVISION,
    SCHEME,
)
_META = (
    "uid",
    "name",
    "namespace",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")
_WAITING = ("reason", "message")
_TERMINATED = ("exitCode", "reason", "message")


def excerpt(plural: str, body: Raw) -> dict[str, Any]:
    """A new object of the same shape; what it holds is of a bounded size, but for the status of a task or a pipeline, which
    the CRD bounds. Of a kind that the operator does not watch it is the whole object."""
    read = _OF.get(plural)
    if read is None:
        return dict(body)
    return {**_some(body, ("apiVersion", "kind")), "metadata": _metadata(body["metadata"]), **read(body)}


def _metadata(meta: Raw) -> dict[str, Any]:
    kept = _some(meta, _META)
    for field, names in (("labels", (LABEL_PIPELINE,)), ("annotations", ANNOTATIONS)):
        held = _some(meta.get(field) or {}, names)
        if held:
            kept[field] = held
    owners = [
        _some(one, ("kind", "uid"))
        for one in meta.get("ownerReferences") or ()
        if one.get("kind") == pipeline.KIND
    ]
    if owners:
        kept["ownerReferences"] = owners[:MOST_ENTRIES]
    return kept


def _custom(body: Raw) -> dict[str, Any]:
    spec, kept = body.get("spec"), {}
    if spec is not None:
        problem = oversized(spec)
        kept["spec"] = spec if problem is None else {TOO_LARGE: problem}
    if "status" in body:
        kept["status"] = body["status"]
    return kept


def _statefulset(body: Raw) -> dict[str, Any]:
    spec = body.get("spec") or {}
    template = ((spec.get("template") or {}).get("metadata") or {}).get("annotations") or {}
    return {
        "spec": {
            **_some(spec, ("replicas",)),
            "template": {"metadata": {"annotations": _some(template, (SCHEME,))}},
        },
        "status": _some(body.get("status") or {}, ("observedGeneration", "replicas")),
    }


def _pod(body: Raw) -> dict[str, Any]:
    status = body.get("status") or {}
    kept = _some(status, ("phase", "reason", "message"), LONGEST_WORDS)
    for name, read in (
        ("conditions", _condition),
        ("initContainerStatuses", _container),
        ("containerStatuses", _container),
    ):
        if name in status:
            kept[name] = [read(one) for one in _first(status[name])]
    return {"status": kept}


def _condition(one: Raw) -> dict[str, Any]:
    return _some(one, _CONDITION, LONGEST_WORDS)


def _container(one: Raw) -> dict[str, Any]:
    kept = _some(one, ("restartCount",))
    for name in ("state", "lastState"):
        held = one.get(name) or {}
        kept[name] = {
            which: _some(held[which], fields, LONGEST_WORDS)
            for which, fields in (("waiting", _WAITING), ("terminated", _TERMINATED))
            if held.get(which) is not None
        }
    return kept


def _event(body: Raw) -> dict[str, Any]:
    about = _some(body.get("involvedObject") or {}, ("kind", "namespace", "name", "uid"))
    return {**_some(body, ("reason", "message", "lastTimestamp", "eventTime")), "involvedObject": about}


def _nothing(_: Raw) -> dict[str, Any]:
    return {}


_OF: Mapping[str, Callable[[Raw], dict[str, Any]]] = {
    task.PLURAL: _custom,
    pipeline.PLURAL: _custom,
    "statefulsets": _statefulset,
    "services": _nothing,
    "pods": _pod,
    "events": _event,
}


def _some(whole: Raw, names: Iterable[str], longest: int = LONGEST_TEXT) -> dict[str, Any]:
    """These fields, texts cut."""
    held = {name: whole[name] for name in names if name in whole}
    return {name: value[:longest] if isinstance(value, str) else value for name, value in held.items()}


def _first(many: Any) -> list[Any]:
    return list(many or ())[:MOST_ENTRIES]
