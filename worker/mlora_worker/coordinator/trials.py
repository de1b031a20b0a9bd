"""Who is to blame for a fault that came out of the computing of several tasks. Pure.

Rule:

1. All tasks of a microbatch that failed are *suspects*, also one that was alone in it: others were in the pipeline and
   held memory, and a fault that passes is nobody's.
2. Each suspect repeats its step alone in the pipeline, one after the other, in the order in which they were accused.
   Nothing else enters meanwhile.
3. A step that comes back whole clears its task. One that fails again convicts it, unless memory ran out in a microbatch of
   several rows: then the task tries again with narrower microbatches, down to single rows.
4. When nobody waits any more, there is a verdict. The convicted fail. If memory ran out and nobody is convicted, the
   microbatch was too wide: those who shared it travel in narrower ones from then on.
5. If two tasks or more are convicted of the same fault, none is cleared, and it is not about memory, then it is the
   pipeline's fault and not theirs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mlora_worker.pipeline.faults import Fault


@dataclass(frozen=True, slots=True)
class Charge:
    """The fault of a step, with the widest microbatch that it came from."""

    fault: Fault
    tokens: int
    rows: int

    @property
    def may_be_too_wide(self) -> bool:
        return self.fault.out_of_memory and self.rows > 1


@dataclass(frozen=True, slots=True)
class Verdict:
    convicted: dict[str, Fault] = field(default_factory=dict)
    narrowed: dict[str, int] = field(
        default_factory=dict
    )  # tasks, with the tokens of their microbatches from now on
    pipeline: Fault | None = None  # then nobody is convicted


class Trials:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._accused: dict[str, Charge] = {}  # of this case: who waits, who is convicted, who is cleared
        self._convicted: dict[str, Fault] = {}

    @property
    def next(self) -> str | None:
        """The task whose step goes through the pipeline alone now."""
        return self._waiting[0] if self._waiting else None

    def accuse(self, task: str, charge: Charge) -> int | None:
        """A step of ``task`` came back with a fault. Gives the tokens to which its microbatches must be narrowed before
        it tries again, where that is so."""
        if task not in self._waiting:
            self._accused[task] = charge
            self._waiting.append(task)
            return None
        if charge.may_be_too_wide:
            return charge.tokens // 2
        self._waiting.remove(task)
        self._convicted[task] = charge.fault
        return None

    def clear(self, task: str) -> None:
        """A step of ``task`` came back whole."""
        if task in self._waiting:
            self._waiting.remove(task)

    def drop(self, task: str) -> None:
        """``task`` leaves, or failed for another reason."""
        self.clear(task)
        self._accused.pop(task, None)
        self._convicted.pop(task, None)

    def verdict(self) -> Verdict | None:
        """Once nobody waits, and once only."""
        if self._waiting or not self._accused:
            return None
        accused, convicted = self._accused, self._convicted
        self._accused, self._convicted = {}, {}
        same = {fault.kind for fault in convicted.values()}
        if len(convicted) > 1 and convicted.keys() == accused.keys() and len(same) == 1:
            fault = next(iter(convicted.values()))
            if not fault.out_of_memory:
                return Verdict(pipeline=fault)
        if convicted:
            return Verdict(convicted=convicted)
        wide = {task: charge.tokens // 2 for task, charge in accused.items() if charge.may_be_too_wide}
        return Verdict(narrowed=wide)
