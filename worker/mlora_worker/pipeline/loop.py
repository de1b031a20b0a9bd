"""The loop of one rank: takes what the mailbox gives, computes, passes on. It reads from top to bottom; nothing is hidden.

Every rank runs the same loop. What differs is told by ``Neighbours``: the first stage hands finished microbatches to the
coordinator instead of a former stage, the last one turns round from forward to backward at once.

A fault (``faults.py``) never changes what travels: a microbatch that could not be computed is handed on as zeros of the
same shape, and its stats, on their way back, count its faults. So the stream stays in step, and rank 0, which decides what
happens next, cannot miss one. A task that cannot be computed here at all is *broken* here until it is unloaded.

The loop never waits for its device: stats stay on it, and whoever needs them on the host reads them later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.pipeline.faults import Fault, OnFault, Phase, fault_of, is_fatal, recover
from mlora_worker.pipeline.mailbox import Entry, Mailbox
from mlora_worker.pipeline.results import Evaluated, StageState
from mlora_worker.pipeline.trace import Record, unrecorded
from mlora_worker.pipeline.transport import STATS, BackwardMessage
from mlora_worker.stream.items import Checkpoint, Evaluate, Keep, Load, Save, Segment, Stop, Train, Unload

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Neighbours(Protocol):
    """Where results go. ``Transport`` sends them to other ranks."""

    def send_forward(self, hidden: Tensor) -> None: ...
    def send_backward(self, gradient: Tensor, stats: Tensor) -> None: ...


# Rank 0: number, stats [segments, STATS] float64 on the device, see there.
OnReturned = Callable[[int, Tensor], None]
OnExported = Callable[[str, dict[str, Tensor]], None]  # task, this stage's part of the adapter on the CPU
OnEvaluated = Callable[
    [int, Tensor], None
]  # last stage: number, scores float64 on the device, see ``Evaluated``
OnKept = Callable[[Keep, dict[str, Tensor]], None]  # this stage's part of the adapter on the CPU
OnCheckpoint = Callable[[Checkpoint, StageState], None]  # this stage's part of the task's state


@dataclass(slots=True)
class _Passing:
    """A microbatch between its forward and its backward on this rank."""

    item: Train
    faults: int  # of this rank
    arrived: Tensor | None  # from the former stage; None on rank 0


class StageLoop:
    def __init__(
        self,
        *,
        first: bool,
        last: bool,
        engine: StageEngine,
        mailbox: Mailbox,
        neighbours: Neighbours,
        on_returned: OnReturned,
        on_exported: OnExported,
        on_fault: OnFault,
        on_checkpoint: OnCheckpoint | None = None,
        on_evaluated: OnEvaluated | None = None,
        on_kept: OnKept | None = None,
        record: Record = unrecorded,
    ) -> None:
        self._first, self._last = first, last
        self._engine, self._mailbox, self._neighbours = engine, mailbox, neighbours
        self._on_returned, self._on_exported, self._on_fault = on_returned, on_exported, on_fault
        self._on_checkpoint = on_checkpoint
        self._on_evaluated, self._on_kept = on_evaluated, on_kept
        self._record = record
        self._passing: dict[int, _Passing] = {}
        self._broken: dict[str, Fault] = {}  # tasks that cannot be computed here, by what broke them

    def run(self) -> None:
        """Work until ``Stop``. Raises what ended the group otherwise."""
        while self._do(self._mailbox.take()):
            pass  # nothing of what was done is held while there is nothing to do: it may be a task's whole state

    def _do(self, work: BackwardMessage | Entry) -> bool:
        """False once the stream has stopped."""
        if isinstance(work, BackwardMessage):
            self._backward(work.number, work.gradient, work.stats)
            return True
        item = work.item
        match item:
            case Train():
                self._forward(item, work)
            case Evaluate():
                self._evaluate(item, work)
            case Keep():
                self._of_task(item.number, item.task, Phase.KEEP, partial(self._keep, item))
            case Load():
                load = partial(self._engine.load, item, work.state)
                self._of_task(item.number, item.task, Phase.LOAD, load)
            case Checkpoint():
                self._of_task(item.number, item.task, Phase.CHECKPOINT, partial(self._checkpoint, item))
            case Save():
                self._of_task(item.number, item.task, Phase.SAVE, partial(self._save, item))
            case Unload():
                self._broken.pop(item.task, None)
                self._engine.unload(item.task)
            case Stop():
                return False
        return True

    def _forward(self, item: Train, entry: Entry) -> None:
        passing = self._passing[item.number] = _Passing(item, faults=0, arrived=entry.hidden)
        for segment in item.segments:
            settle = partial(self._engine.settle, segment)
            update = (
                self._record("update", item.number, (segment.task,), 0) if segment.update else nullcontext()
            )
            with update:
                passing.faults += not self._of_task(item.number, segment.task, Phase.UPDATE, settle)
        out = None
        if not passing.faults:
            forward = partial(
                self._engine.forward,
                _settled(item),
                token_ids=entry.token_ids,
                hidden=entry.hidden,
                labels=entry.labels,
            )
            with self._record("forward", item.number, _tasks(item), item.tokens):
                out = self._attempt(item.number, Phase.FORWARD, forward)
            passing.faults += out is None
        if not self._last:
            hidden = out.hidden if out is not None else self._blank_forward(item, entry.hidden)
            assert hidden is not None
            self._neighbours.send_forward(hidden)
            return
        stats = torch.zeros(len(item.segments), STATS, dtype=torch.float64, device=self._engine.stage.device)
        if out is not None:
            assert out.losses is not None
            stats[:, 0] = out.losses
            if out.rewards is not None:
                stats[:, 3:] = out.rewards
        self._backward(item.number, None, stats)

    def _evaluate(self, item: Evaluate, entry: Entry) -> None:
        """What fails here is the task's own: nobody else is in the microbatch."""
        found: list[Evaluated] = []

        def work() -> None:
            arguments = {"token_ids": entry.token_ids, "hidden": entry.hidden, "labels": entry.labels}
            found.append(self._engine.evaluate(item, **arguments))

        with self._record("evaluate", item.number, (item.task,), item.tokens):
            self._of_task(item.number, item.task, Phase.EVALUATE, work)
        out = found[0] if found else None
        if not self._last:
            hidden = out.hidden if out is not None else self._blank_forward(item, entry.hidden)
            assert hidden is not None
            self._neighbours.send_forward(hidden)
        elif out is not None:
            assert out.scores is not None
            assert self._on_evaluated is not None, "this rank does not collect evaluations"
            self._on_evaluated(item.number, out.scores)

    def _keep(self, keep: Keep) -> None:
        assert self._on_kept is not None, "this rank does not collect adapters"
        self._on_kept(keep, self._engine.export(keep.task))

    def _backward(self, number: int, gradient: Tensor | None, stats: Tensor) -> None:
        passing = self._passing.pop(number)
        out = None
        if not passing.faults:
            backward = partial(self._engine.backward, number, gradient)
            with self._record("backward", number, _tasks(passing.item), passing.item.tokens):
                out = self._attempt(number, Phase.BACKWARD, backward)
            passing.faults += out is None
        if out is not None:
            stats[:, 1] += out.squared_norms
        else:
            stats[:, 2] += passing.faults
        if self._first:
            self._on_returned(number, stats)
            return
        spare = gradient if gradient is not None else passing.arrived
        below = out.gradient if out is not None else self._blank_backward(passing.item, spare)
        assert below is not None
        self._neighbours.send_backward(below, stats)

    def _blank_forward(self, item: Train | Evaluate, spare: Tensor | None) -> Tensor:
        return self._blank(item, self._engine.stage.leaving.width, spare)

    def _blank_backward(self, item: Train, spare: Tensor | None) -> Tensor:
        return self._blank(item, self._engine.stage.entering.learnt, spare)

    def _blank(self, item: Train | Evaluate, width: int, spare: Tensor | None) -> Tensor:
        """[tokens, width] zeros, which travel in the place of what could not be computed. ``spare`` is of no use any more:
        it is taken where it is large enough, since memory may be what lacks. Rank 0 alone has none.
        """
        numbers = item.tokens * width
        if spare is None or spare.numel() < numbers:
            return self._engine.blank(item.tokens, width)
        return spare.detach().reshape(-1)[:numbers].view(item.tokens, width).zero_()

    def _checkpoint(self, checkpoint: Checkpoint) -> None:
        if checkpoint.update is not None:
            self._engine.apply(checkpoint.task, checkpoint.update)
        assert self._on_checkpoint is not None, "this rank does not collect checkpoints"
        self._on_checkpoint(checkpoint, self._engine.snapshot(checkpoint.task))

    def _save(self, save: Save) -> None:
        if save.update is not None:
            self._engine.apply(save.task, save.update)
        self._on_exported(save.task, self._engine.export(save.task))

    def _of_task(self, number: int, task: str, phase: Phase, work: Callable[[], None]) -> bool:
        """Do what concerns one task alone; False when it failed, now or earlier: the task is broken here."""
        known = self._broken.get(task)
        if known is not None:
            self._on_fault(known.model_copy(update={"number": number}))
            return False
        fault = self._try(number, phase, task, work)
        if not isinstance(fault, Fault):
            return True
        self._broken[task] = fault
        self._on_fault(fault)
        return False

    def _attempt(self, number: int, phase: Phase, work: Callable[[], Result]) -> Result | None:
        """Compute a microbatch; None when it failed, for a reason that any of its tasks may have."""
        result = self._try(number, phase, None, work)
        if not isinstance(result, Fault):
            return result
        self._on_fault(result)
        return None

    def _try(self, number: int, phase: Phase, task: str | None, work: Callable[[], Result]) -> Result | Fault:
        """What ``work`` gives, or its fault. Raises what this rank does not survive."""
        try:
            return work()
        except Exception as error:
            if is_fatal(error):
                raise
            log.error("%s of item %d failed; the rank continues", phase, number, exc_info=error)
            fault = fault_of(error, stage=self._engine.stage.index, number=number, phase=phase, task=task)
        # Only now has the exception gone, and with it its frames and the tensors that they held.
        self._engine.abandon(number)
        recover(self._engine.stage.device)
        return fault


def _tasks(item: Train) -> tuple[str, ...]:
    return tuple(segment.task for segment in item.segments)


def _settled(item: Train) -> Train:
    """``item`` once its segments are settled."""
    if not any(segment.update is not None or segment.discard for segment in item.segments):
        return item
    return item.model_copy(update={"segments": tuple(map(_without_wishes, item.segments))})


def _without_wishes(segment: Segment) -> Segment:
    return segment.model_copy(update={"update": None, "discard": False})
