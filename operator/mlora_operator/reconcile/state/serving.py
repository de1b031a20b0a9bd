"""Whose tasks a pipeline takes, and which of several goes first. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from mlora_operator.api.meta import NamespacesFrom
from mlora_operator.manifests.names import catalogue_name
from mlora_operator.reconcile.state.snapshot import Key, Pipeline
from mlora_operator.rights import Rights

Labels = Mapping[str, Mapping[str, str]]  # of namespaces

OWN, CATALOGUE, OPERATORS, GIVEN = range(4)  # standings, the first goes first


def takes(pipeline: Pipeline, namespace: str, labels: Labels, rights: Rights) -> bool | None:
    """Whether it takes tasks of a namespace; None where that is not known, since the namespace's labels could not be read.

    1. One whose namespace has no right to serve others takes tasks of its own, whatever it says.
    2. Else as ``allowedNamespaces`` says.
    """
    assert pipeline.spec is not None
    if not rights.serves_others(pipeline.key.namespace):
        return pipeline.key.namespace == namespace
    allowed = pipeline.spec.allowed_namespaces
    match allowed.from_:
        case NamespacesFrom.ALL:
            return True
        case NamespacesFrom.SAME:
            return pipeline.key.namespace == namespace
        case NamespacesFrom.SELECTOR:
            held = labels.get(namespace)
            if held is None:
                return None
            wanted = allowed.selector or {}
            return bool(wanted) and all(held.get(name) == value for name, value in wanted.items())


def standing(pipeline: Pipeline, namespace: str, rights: Rights) -> int:
    """Of the pipelines that may serve a task of ``namespace``, which kind goes first:

    1. One in the task's own namespace: its tenants share neither its process nor its memory with others.
    2. The catalogue's: the platform team names its image and its model in one place.
    3. Others in the operator's namespace.
    4. Those in namespaces that were given the right to serve others.
    """
    if pipeline.key.namespace == namespace:
        return OWN
    if is_catalogues(pipeline, rights):
        return CATALOGUE
    return OPERATORS if pipeline.key.namespace == rights.namespace else GIVEN


def precedence(pipeline: Pipeline, namespace: str, rights: Rights) -> tuple[int, datetime, Key]:
    """By standing, then age, then name."""
    return standing(pipeline, namespace, rights), pipeline.created, pipeline.key


def is_catalogues(pipeline: Pipeline, rights: Rights) -> bool:
    """The operator made it for an entry of its catalogue. The annotation alone is nothing: anybody may write one."""
    if pipeline.spec is None or pipeline.catalogue_hash is None:
        return False
    return pipeline.key == Key(rights.namespace, catalogue_name(pipeline.spec.model.name))


def claims_in_vain(pipeline: Pipeline, rights: Rights) -> str | None:
    """Why one that means to serve other namespaces serves its own alone, and what to do; None where it does as it says."""
    if pipeline.spec is None or rights.serves_others(pipeline.key.namespace):
        return None
    allowed, own = pipeline.spec.allowed_namespaces.from_, pipeline.key.namespace
    if allowed is NamespacesFrom.SAME:
        return None
    return (
        f"spec.allowedNamespaces says from: {allowed.value}, but pipelines in namespace {own} serve tasks of {own} only, "
        f"since the platform team has not given them the right to serve others: it does so by adding {own} to "
        "serving.namespaces in the values of the operator's chart; else set from: Same"
    )
