"""Who is to blame for a fault that came out of the computing of several tasks. Pure.

Rule:

1. All tasks of a microbatch that failed are *suspects*, also one that was alone in it: others were in the pipeline and
   held memory, and a fault that passes is nobody's.
2. Each suspect repeats its step alone in the pipeline, one after the other, in the order in which they were accused.
   Nothing else enters meanwhile.
3. A step that comes back whole clears its task. One that fails again convicts it, unless memory ran out in a microbatch of
   several rows: then the task tries again with narrower microbatches, down to single rows.
4. If all are convicted of the same fault, and it is not about memory, it may be the pipeline's. Then a task that was not
   accused is the *witness*: its next step travels alone, too. If that comes back whole, the convictions stand. Where
   several are convicted and there is no such task, the witness is one that is made up (``probe.py``): rows that no model
   can take are their tasks' fault however many have them. Of itself, a made-up witness is never convicted.
5. When nobody waits any more, there is a verdict. The convicted fail; of want of memory only when they are alone in the
   pipeline, else they leave it until there is more room. If memory ran out and nobody is convicted, the microbatch was too
   wide: those who shared it travel in narrower ones from then on. If that was done before, or it was of single rows, the
   pipeline is too *full*: the newest of them leaves until there is more room. If two tasks or more are convicted of the
   same fault and nobody passed, it is the pipeline's fault and not theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
class Attribution:
    convicted: dict[str, Fault] = field(default_factory=dict)
    narrowed: dict[str, int] = field(
        default_factory=dict
    )  # tasks, with the tokens of their microbatches from now on
    pipeline: Fault | None = None  # then nobody is convicted
    full: Fault | None = None  # too many tasks for the memory of this fault's stage, all of them accused
    accused: tuple[str, ...] = ()


class Trials:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._accused: dict[str, Charge] = {}  # of this case: who waits, who is convicted, who is cleared
        self._convicted: dict[str, Fault] = {}
        self._probe: str | None = None
        self._passed = False  # somebody has, in this case
        self._narrowed: set[str] = set()  # by an earlier verdict

    @property
    def next(self) -> str | None:
        """The task whose step goes through the pipeline alone now."""
        return self._waiting[0] if self._waiting else None

    def accuse(self, task: str, charge: Charge) -> int | None:
        """A step of ``task`` came back with a fault. Gives the tokens to which its microbatches must be narrowed before
        it tries again, where that is so."""
        if task == self._probe:
            self._probe = None
            self._accused[task] = charge  # and it tries again, as everybody may
            return None
        if task not in self._waiting:
            self._passed = self._passed and bool(self._accused)  # a new case knows of nobody
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
            self._passed = True
            self._remove(task)

    def drop(self, task: str) -> None:
        """``task`` leaves, or failed for another reason."""
        self._remove(task)
        self._narrowed.discard(task)
        self._accused.pop(task, None)
        self._convicted.pop(task, None)

    def verdict(self, others: Sequence[str] = (), made_up: str | None = None) -> Attribution | None:
        """Once nobody waits, and once only. ``others``: tasks that could be a witness; ``made_up``: one where none of them
        can."""
        if self._waiting or not self._accused:
            return None
        accused, convicted, passed = self._accused, self._convicted, self._passed
        fault = next(iter(convicted.values()), None)
        same = len({one.kind for one in convicted.values()}) == 1
        general = fault is not None and same and not passed and not fault.out_of_memory
        if general:
            spare = (made_up,) if made_up is not None and len(convicted) > 1 else ()
            witness = next((task for task in (*others, *spare) if task not in accused), None)
            if witness is not None:
                self._probe = witness
                self._waiting.append(witness)
                return None
        self._accused, self._convicted, self._passed = {}, {}, False
        if general and len(convicted) > 1:
            return Attribution(pipeline=fault)
        if made_up is not None:  # it failed of another fault than they, such as the memory that they hold
            accused.pop(made_up, None)
            convicted.pop(made_up, None)
        if convicted:
            return Attribution(convicted=convicted)
        wide = {task: charge.tokens // 2 for task, charge in accused.items() if charge.may_be_too_wide}
        spent = next((one.fault for one in accused.values() if one.fault.out_of_memory), None)
        if spent is not None and (not wide or wide.keys() <= self._narrowed):
            return Attribution(full=spent, accused=tuple(accused))
        self._narrowed |= wide.keys()
        return Attribution(narrowed=wide)

    def _remove(self, task: str) -> None:
        if task in self._waiting:
            self._waiting.remove(task)
        if task == self._probe:
            self._probe = None
