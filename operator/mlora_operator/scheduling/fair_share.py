"""Policy ``fairShare``: namespaces are served in proportion to their weights. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mlora_operator.scheduling.entrant import Entrant
from mlora_operator.scheduling.first_come import first_come
from mlora_operator.scheduling.order import Candidate


@dataclass(frozen=True, slots=True)
class FairShare:
    """Start-time fair queueing (Goyal et al., 1996) over namespaces, with tokens as the service.

    1. Within a namespace the order is that of ``first_come``, and a task preempts one of lower priority.
    2. A namespace's virtual time is what it was served lately (``served``, tokens), divided by its weight.
    3. A task's tag is its namespace's virtual time once all its namespace's tasks before it are done:
       ``(served + their remaining tokens) / weight``. The smaller tag goes first; of equal tags, as ``first_come`` says of
       tasks of one priority, since a priority is an agreement within its namespace. Where a task's remaining tokens are not
       known, the mean of the known ones is taken.
    4. A task preempts one of another namespace when that namespace's virtual time is ahead by more than
       ``quantum``: after that the former has a whole quantum to catch up before the reverse can be.

    Of tasks of one namespace, whatever it was served, it says what ``Priority`` says.
    """

    steady: ClassVar[bool] = False
    served: Mapping[str, float] = field(default_factory=dict)  # tokens by namespace; one that is missing: 0
    weights: Mapping[str, float] = field(default_factory=dict)  # by namespace; one that is missing: 1
    quantum: float = math.inf  # tokens at weight 1; infinite: no displacement between namespaces

    def order(self, entrants: Sequence[Entrant]) -> Sequence[Entrant]:
        known = [left for one in entrants if (left := one.progress.remaining_tokens) is not None]
        usual = sum(known) / len(known) if known else 1.0
        ahead: defaultdict[str, float] = defaultdict(float)
        come = first_come(entrants)
        ages, latest = _ages(come), dict[str, int]()
        tagged = []
        for number, one in enumerate(come):
            namespace = one.task.namespace
            # No task goes before one that its own namespace puts first.
            latest[namespace] = max(ages[one.uid], latest.get(namespace, 0))
            tagged.append((self._virtual_time(namespace, ahead[namespace]), latest[namespace], number, one))
            left = one.progress.remaining_tokens
            ahead[namespace] += usual if left is None else left
        return [one for *_, one in sorted(tagged, key=lambda item: item[:3])]

    def displaces(self, waiting: Entrant, running: Entrant) -> bool:
        mine, theirs = waiting.task.namespace, running.task.namespace
        if mine == theirs:
            return waiting.task.priority > running.task.priority
        return self._virtual_time(mine) + self.quantum < self._virtual_time(theirs)

    def _virtual_time(self, namespace: str, more: float = 0.0) -> float:
        return (self.served.get(namespace, 0.0) + more) / self.weights.get(namespace, 1.0)


def _ages(come: Sequence[Entrant]) -> Mapping[str, int]:
    """Places by uid where all are of one priority."""
    if len({one.task.priority for one in come}) > 1:
        come = first_come(map(_without_priority, come))
    return {one.uid: number for number, one in enumerate(come)}


def _without_priority(one: Entrant) -> Entrant:
    task = one.task
    if not task.priority:
        return one
    return one._replace(task=Candidate(task.uid, task.namespace, task.name, 0, task.created))
