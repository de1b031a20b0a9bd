"""Whose tasks a pipeline takes, which of several goes first, and who serves a model. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
        f"spec.allowedNamespaces says from: {allowed.value}, but pipelines in namespace {own} serve tasks of {own} "
        f"only, because the platform team has not allowed it to serve others: add {own} to serving.namespaces in the "
        f"values of the operator's chart, or set from: Same"
    )


class ServedModels:
    """Pipelines by the model that they serve, and what is served to a namespace, each worked out once for all tasks of a
    pass: whoever makes a thousand pipelines and a thousand tasks does not make a million questions of it.
    """

    def __init__(self, pipelines: Iterable[Pipeline], labels: Labels, rights: Rights) -> None:
        by_model: defaultdict[str, list[Pipeline]] = defaultdict(list)
        for one in pipelines:
            if one.spec is not None and not one.deleting:
                by_model[one.spec.model.name].append(one)
        self._by_model = dict(by_model)
        self._by_name = {str(one.key): one for serving in by_model.values() for one in serving}
        self._labels, self._rights = labels, rights
        self._models: dict[str, frozenset[str]] = {}  # by namespace

    def by(self, model: str) -> Sequence[Pipeline]:
        """Those that serve it, to whomever."""
        return self._by_model.get(model, ())

    def named(self, names: Iterable[str]) -> list[Pipeline]:
        """Those of these names (namespace/name) that serve any model."""
        return [self._by_name[name] for name in names if name in self._by_name]

    def models(self, namespace: str) -> frozenset[str]:
        """Those that are served to a namespace."""
        known = self._models.get(namespace)
        if known is None:
            known = self._models[namespace] = frozenset(
                model
                for model, serving in self._by_model.items()
                if any(takes(one, namespace, self._labels, self._rights) for one in serving)
            )
        return known
