"""What the platform team gives to namespaces in the operator's settings: rights that no field of a tenant's object takes.

Whoever may create a LoRAPipeline chooses the image that runs with the keys of its tasks. So whose tasks a pipeline is given
is not for that pipeline to say: ``allowedNamespaces`` only narrows what its namespace has the right to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from mlora_operator.api.meta import Model
from mlora_operator.api.priorities import Priorities

EVERY = "*"  # in place of a namespace: all of them
# The highest priority that reaches tasks of other namespaces where nobody has given the task's namespace more.
UNASKED = 0

Parts = tuple[str, ...]  # scheme, for S3 the bucket, and the parts of the path

Namespace = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
NamespaceOrEvery = Annotated[str, Field(max_length=63, pattern=r"^(\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$")]


# s3://bucket or s3://bucket/prefix, of whichever endpoint; file:///folder.
Prefix = Annotated[str, Field(max_length=1024, pattern=r"^(s3://[^/]+(/.*)?|file:///+[^/].*)$")]


class ServingSettings(Model):
    """``namespaces``: whose pipelines may serve tasks of other namespaces, beside the operator's own; ``*``: all."""

    namespaces: tuple[NamespaceOrEvery, ...] = ()


class OutputSettings(Model):
    """``prefixes``: by namespace, where in stores its tasks alone may write."""

    prefixes: dict[Namespace, tuple[Prefix, ...]] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rights:
    """``namespace``: the operator's own, which may serve all others. ``prefixes``: each as an address, with its parts and
    whose it is. ``priorities``: on the pipelines of all namespaces.
    """

    namespace: str
    serving: frozenset[str] = frozenset()
    prefixes: tuple[tuple[str, Parts, frozenset[str]], ...] = ()
    priorities: Priorities = field(default_factory=Priorities)
    buckets: frozenset[str] = field(init=False)  # that some prefix is in

    def __post_init__(self) -> None:
        found = frozenset(part for _, parts, _ in self.prefixes for part in parts[1:2] if parts[0] == "s3")
        object.__setattr__(self, "buckets", found)

    def serves_others(self, namespace: str) -> bool:
        """Whether pipelines in ``namespace`` may be given tasks of other namespaces."""
        return namespace == self.namespace or namespace in self.serving or EVERY in self.serving

    def may_serve(self, pipeline: str, task: str) -> bool:
        """Whether a pipeline in the namespace ``pipeline`` may be given a task of the namespace ``task``, with its keys."""
        return pipeline == task or self.serves_others(pipeline)

    def owners_of(self, place: Parts) -> frozenset[str] | None:
        """The namespaces that alone may have ``place`` as an output; None: any.

        1. In a prefix that was given to namespaces, those; of several such prefixes the longest counts.
        2. Above prefixes, those who have all of these: an output above one has all that is below it.
        """
        around = [(len(parts), owners) for _, parts, owners in self.prefixes if place[: len(parts)] == parts]
        below = [owners for _, parts, owners in self.prefixes if parts[: len(place)] == place != parts]
        given = [*below, max(around, key=lambda one: one[0])[1]] if around else below
        return frozenset.intersection(*given) if given else None

    def prefixes_of(self, namespace: str) -> tuple[str, ...]:
        return tuple(prefix for prefix, _, owners in self.prefixes if namespace in owners)

    def reach(self, namespace: str) -> int | None:
        """Up to where the priority of a task of ``namespace`` counts beside other namespaces' tasks on other pipelines, of
        which no pipeline's owner could say it: what it was given; None, without a bound, where it may serve others.
        """
        own, others = self.priorities.namespaces.get(namespace), self.priorities.default.max
        if own is not None and own.max is not None:
            return own.max
        if self.serves_others(namespace):
            return None
        return UNASKED if others is None else others


def rights_of(
    namespace: str, serving: ServingSettings, outputs: OutputSettings, priorities: Priorities | None = None
) -> Rights:
    """``namespace``: the operator's own."""
    owners: dict[Parts, tuple[str, set[str]]] = {}
    for one, prefixes in sorted(outputs.prefixes.items()):
        for prefix in prefixes:
            scheme, _, path = prefix.partition("://")
            parts = (scheme, *(part for part in path.split("/") if part and (part != "." or scheme == "s3")))
            owners.setdefault(parts, (prefix, set()))[1].add(one)
    given = tuple((prefix, parts, frozenset(names)) for parts, (prefix, names) in sorted(owners.items()))
    return Rights(namespace, frozenset(serving.namespaces), given, priorities or Priorities())
