"""What each namespace has of the pipelines: its tasks and the tokens that they trained. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from mlora_operator.page.documents import NamespaceDocument, NamespaceList
from mlora_operator.page.numbers import rounded, speed
from mlora_operator.page.order import FINAL_STATES, TRAINING_STATES, Standing
from mlora_operator.reconcile.admission.workload import served_by_status


@dataclass(slots=True)
class _Sum:
    training: int = 0
    waiting: int = 0
    succeeded: int = 0
    failed: int = 0
    tokens_per_second: float = 0.0
    trained_tokens: float = 0.0

    def add(self, one: Standing) -> None:
        self.training += one.state in TRAINING_STATES
        self.waiting += one.state not in TRAINING_STATES and one.state not in FINAL_STATES
        self.succeeded += one.state == "Succeeded"
        self.failed += one.state == "Failed"
        self.tokens_per_second += speed(one) or 0.0
        self.trained_tokens += served_by_status(one.task, one.status)


def namespaces(standings: Iterable[Standing], offset: int, limit: int) -> NamespaceList:
    """``limit`` of them from the one at ``offset`` on: first those with the most tasks in training, then with the most
    that wait, then by name."""
    sums: defaultdict[str, _Sum] = defaultdict(_Sum)
    for one in standings:
        sums[one.task.key.namespace].add(one)
    ordered = sorted(sums.items(), key=lambda item: (-item[1].training, -item[1].waiting, item[0]))
    return NamespaceList(
        total=len(ordered),
        offset=offset,
        namespaces=tuple(_document(name, found) for name, found in ordered[offset : offset + limit]),
    )


def _document(name: str, found: _Sum) -> NamespaceDocument:
    return NamespaceDocument(
        namespace=name,
        training=found.training,
        waiting=found.waiting,
        succeeded=found.succeeded,
        failed=found.failed,
        tokens_per_second=rounded(found.tokens_per_second),
        trained_tokens=round(found.trained_tokens),
    )
