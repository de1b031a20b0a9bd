"""How high a task's priority may be: bounds that a pipeline, or the platform team for all pipelines, sets by namespace."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mlora_operator.api.meta import Model
from mlora_operator.api.quantities import NamespaceName

HIGHEST = 1_000_000

Priority = Annotated[int, Field(strict=True, ge=-HIGHEST, le=HIGHEST)]


class PriorityBound(Model):
    """There is no lower bound."""

    max: Priority | None = Field(
        default=None,
        description="The highest spec.priority that a task may have; absent: nothing is said here.",
    )


class Priorities(Model):
    """Bounds of ``spec.priority`` by the namespace of the task."""

    default: PriorityBound = Field(
        default_factory=PriorityBound,
        description="Of tasks whose namespace is not listed and is another one than the pipeline's.",
    )
    namespaces: dict[NamespaceName, PriorityBound] = Field(
        default_factory=dict,
        max_length=1000,
        description="Of tasks of these namespaces, such as {team-a: {max: 1000}}.",
    )
