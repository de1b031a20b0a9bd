"""Whether a task is served, and where. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import Pipeline
from mlora_operator.settings import CatalogueModel


@dataclass(frozen=True, slots=True)
class Acceptance:
    """``pipeline`` is set when the task is accepted; ``wanted`` when a pipeline is to be made first; ``held`` when the
    workers that had the task may still train it, or when it is looked at later: nothing is done about it, and its status
    stays as it is. ``priority``: what the task's counts as instead of its own, where it trains with a higher one than it
    may have.
    """

    cause: Cause
    pipeline: Pipeline | None = None
    wanted: CatalogueModel | None = None
    held: bool = False
    priority: int | None = None
