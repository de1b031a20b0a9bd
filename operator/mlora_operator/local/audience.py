"""Who is told how a local run goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mlora_operator.reconcile.state.decision import Event


class Audience(Protocol):
    def task_changed(self, task: Mapping[str, Any]) -> None:
        """The whole task, as ``kubectl get -o json`` would show it."""

    def happened(self, event: Event) -> None: ...
