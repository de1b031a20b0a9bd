"""What the platform team gives to namespaces in the operator's settings: rights that no field of a tenant's object takes.

Whoever may create a LoRAPipeline chooses the image that runs with the keys of its tasks. So whose tasks a pipeline is given
is not for that pipeline to say: ``allowedNamespaces`` only narrows what its namespace has the right to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from mlora_operator.api.meta import Model

EVERY = "*"  # in place of a namespace: all of them

Namespace = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^(\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$")
]


class ServingSettings(Model):
    """``namespaces``: whose pipelines may serve tasks of other namespaces, beside the operator's own; ``*``: all."""

    namespaces: tuple[Namespace, ...] = ()


@dataclass(frozen=True, slots=True)
class Rights:
    """``namespace``: the operator's own, which has every right."""

    namespace: str
    serving: frozenset[str] = frozenset()

    def serves_others(self, namespace: str) -> bool:
        """Whether pipelines in ``namespace`` may be given tasks of other namespaces."""
        return namespace == self.namespace or namespace in self.serving or EVERY in self.serving

    def may_serve(self, pipeline: str, task: str) -> bool:
        """Whether a pipeline in the namespace ``pipeline`` may be given a task of the namespace ``task``, with its keys."""
        return pipeline == task or self.serves_others(pipeline)
