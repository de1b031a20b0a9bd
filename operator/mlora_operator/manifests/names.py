"""Names, labels and annotations of what the operator makes. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

FIELD_MANAGER = "mlora-operator"
PART_OF = "mlora"

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_PART_OF = "app.kubernetes.io/part-of"
LABEL_NAME = "app.kubernetes.io/name"
LABEL_PIPELINE = "mlora.dev/pipeline"  # name of the children's LoRAPipeline, shortened like a child's name
ANNOTATION_PIPELINE = "mlora.dev/pipeline-name"  # the same in full length
REVISION = "mlora.dev/revision"  # annotation: hash of the pod template
SCHEME = "mlora.dev/scheme"  # annotation on a pod: https where its coordinator encrypts; without it, http
LINEAGE = "mlora.dev/lineage"  # annotation: hash of what a task's checkpoints belong to
RETRY = "mlora.dev/retry"  # annotation on a task: a new value starts a failed one again
REPLICA_OF = "mlora.dev/replica-of"  # annotation on a pipeline: the name of the one whose tasks it shares
REPLICA_NUMBER = "mlora.dev/replica-number"  # annotation: from 1; the one whose tasks it shares is number 0
REPLICA_HASH = "mlora.dev/replica-hash"  # annotation: hash of the spec that it was given
CATALOGUE_HASH = "mlora.dev/catalogue-hash"  # annotation: hash of the catalogue's entry

# The controller appends a hyphen and ten characters of hash to make a label of at most 63.
STATEFULSET_NAME_LIMIT = 52
LABEL_LIMIT = 63
NAME_LIMIT = 253  # of objects in general


def digest(content: Any, length: int = 10) -> str:
    """Short, stable hash of anything that JSON can hold."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def safe_name(name: str, limit: int, prefix: str = "") -> str:
    """``prefix`` and ``name`` as a DNS-1035 label of at most ``limit`` characters.

    Pipeline names may hold dots, capital letters of a model's name and 253 characters. Whatever had to be
    changed is told apart by a hash of the whole name, so that two names never become one.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    whole = prefix + plain
    if plain == name and len(whole) <= limit and re.match(r"[a-z]", whole):
        return whole
    tail = "-" + digest(name, 8)
    head = whole if re.match(r"[a-z]", whole) else "m-" + whole
    return head[: limit - len(tail)].rstrip("-") + tail


def child_name(pipeline: str) -> str:
    """Name of a pipeline's StatefulSet and Service; its Secrets' begin with it."""
    return safe_name(pipeline, STATEFULSET_NAME_LIMIT, "mlora-")


def catalogue_name(model: str) -> str:
    """Name of the LoRAPipeline that the operator makes for a base model of its catalogue."""
    return safe_name(model, LABEL_LIMIT)


def replica_name(pipeline: str, number: int) -> str:
    """Name of the LoRAPipeline that is replica ``number`` of another one."""
    tail = f"-replica-{number}"
    if len(pipeline) + len(tail) <= NAME_LIMIT:
        return pipeline + tail
    tail = f"-{digest(pipeline, 8)}{tail}"
    return pipeline[: NAME_LIMIT - len(tail)].rstrip("-.") + tail


def selector(pipeline: str) -> dict[str, str]:
    """Labels by which a pipeline's pods are found; they never change."""
    return {LABEL_NAME: "mlora-worker", LABEL_PIPELINE: safe_name(pipeline, LABEL_LIMIT)}


def labels(pipeline: str) -> dict[str, str]:
    """Labels of all that belongs to a pipeline."""
    return {**selector(pipeline), LABEL_PART_OF: PART_OF, LABEL_MANAGED_BY: FIELD_MANAGER}
