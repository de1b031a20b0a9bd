"""The coordinator: plans come in, reports go out, tasks move. Owns the lock, the pools and the dispatcher.

Three kinds of threads meet here, all under the mailbox's condition: HTTP (``set_plan``, ``wait_report``), rank 0's loop and
the links (``supply``, ``returned``, ``exported``, ``faulted``), and the pools in which tasks are prepared and stored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType

from torch import Tensor

from mlora_worker.coordinator.dispatch.dispatcher import Dispatcher
from mlora_worker.coordinator.dispatch.evictions import LOOK_AGAIN
from mlora_worker.coordinator.parts import CoordinatorParts
from mlora_worker.coordinator.preparation.expected_tensors import expected_tensors
from mlora_worker.coordinator.preparation.fingerprint import day_in, format_in
from mlora_worker.coordinator.preparation.prepare import prepare_task
from mlora_worker.coordinator.preparation.texts import PlanTexts
from mlora_worker.coordinator.task.failure_reason import reason_of
from mlora_worker.coordinator.task.known_plan import not_understood, with_what_is_known
from mlora_worker.coordinator.task.prepared import InitialState, PreparedTask
from mlora_worker.coordinator.task.report import safe_report
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.coordinator.uploads.checkpoints import CheckpointTransfer
from mlora_worker.coordinator.uploads.publisher import Publisher
from mlora_worker.coordinator.uploads.retrier import FEW, Attempt, UploadRetrier, Withdrawn
from mlora_worker.coordinator.uploads.store_identity import (
    PIPELINE_STORE,
    StoreIdentity,
    input_stores,
    output_store,
)
from mlora_worker.model.facts import resolve_targets
from mlora_worker.pipeline.faults import Fault
from mlora_worker.pipeline.mailbox import Entry
from mlora_worker.pipeline.results import StageState
from mlora_worker.preparing.maker import Cancelled
from mlora_worker.protocol import (
    AdapterInfo,
    FailureReason,
    Plan,
    Report,
    TaskPhase,
    TaskPlan,
)
from mlora_worker.storage.artifacts.adapter import FinishedAdapter, fingerprint
from mlora_worker.storage.artifacts.task_state import TaskState
from mlora_worker.storage.object_store.store import Store
from mlora_worker.storage.uri import join
from mlora_worker.stream.timeline import Timeline

log = logging.getLogger(__name__)


Found = PreparedTask | AdapterInfo | FinishedAdapter

CHECKPOINTS_FOLDER = "checkpoints"  # below a task's output


class Coordinator:
    """``changed`` guards all state; it is the mailbox's condition too, so that every change wakes rank 0's loop."""

    def __init__(self, parts: CoordinatorParts, changed: threading.Condition) -> None:
        self._parts = parts
        self._changed = changed
        self._tasks: dict[str, TaskRun] = {}
        self._names: dict[str, str] = {}  # of all tasks that were ever planned, by uid
        self._generation = 0
        # With what was unsupported in it; a number does not identify what two operators sent.
        self._in_force: tuple[Plan, Mapping[str, str]] | None = None
        self._unsupported: Mapping[str, str] = {}  # of tasks that are not here for it, by uid
        self._sequence = 0
        self._texts = PlanTexts()
        self._retrier = UploadRetrier(
            changed=changed, on_change=self._note_change, later=parts.later, clock=parts.clock
        )
        self._open_checkpoints = parts.open_checkpoints or self._below_output
        self._checkpoints = CheckpointTransfer(
            stages=parts.stages,
            tasks=self._tasks,
            open_checkpoints=self._open_checkpoints,
            identity=self._checkpoint_store,
            shapes_of=self._shapes_of,
            spool=parts.spool,
            kept_bytes=parts.kept_bytes,
            aside=parts.aside,
            pool=parts.storing,
            retrier=self._retrier,
            changed=changed,
            on_change=self._note_change,
            meter=parts.meter,
        )
        self._publisher = Publisher(
            base=parts.base,
            open_store=parts.open_store,
            spool=parts.spool,
            aside=parts.aside,
            pool=parts.storing,
            retrier=self._retrier,
            meter=parts.meter,
            checkpoints=self._checkpoints,
            changed=changed,
            on_change=self._note_change,
            on_lost=self._lost,
        )
        self._dispatcher = Dispatcher(
            stages=len(parts.stages),
            budget=parts.microbatch_tokens,
            tasks=self._tasks,
            announce=parts.announce,
            on_change=self._note_change,
            on_pipeline_fault=parts.end,
            clock=parts.clock,
            on_wanted=self._checkpoints.want,
            costs=parts.costs,
            on_stepped=parts.meter.stepped,
            held=parts.held,
            look_again=lambda: parts.later(LOOK_AGAIN, self.held_changed),
            references=parts.references,
            later=lambda call: parts.later(0.0, call),
            with_lock=self._change,
        )

    # --- HTTP threads -------------------------------------------------------------------------------------------

    def set_plan(self, plan: Plan, unsupported: Mapping[str, str] = MappingProxyType({})) -> bool:
        """Take a plan; False when a newer one is known already, or another one of the same number: whoever sent it then
        takes the next number. The same plan twice changes nothing.

        ``unsupported``: by uid, fields of further tasks in the plan that this version does not know. A task that is here
        keeps its former plan; another one fails, and nothing of it was touched.
        """
        with self._changed:
            sent = plan, dict(unsupported)
            taken = (
                self._in_force is not None and plan.generation == self._generation and sent != self._in_force
            )
            if plan.generation < self._generation or taken:
                return False
            self._generation, self._in_force = plan.generation, sent
            self._unsupported = {uid: what for uid, what in unsupported.items() if uid not in self._tasks}
            wanted = {task.uid: task for task in plan.tasks}
            elsewhere = set()  # what is stored for them goes elsewhere now, or nowhere
            allowed = set()  # they may replace what lies at their outputs from now on
            for task in self._tasks.values():
                task.withdrawn = task.uid not in wanted and task.uid not in unsupported
                if task.withdrawn:
                    elsewhere.add(task.uid)
                    self._parts.rows.cancel(task.uid)
            for uid, task_plan in wanted.items():
                if uid in self._tasks:
                    former = self._tasks[uid].plan
                    self._tasks[uid].plan = with_what_is_known(task_plan, former)
                    if self._tasks[uid].plan.storage != former.storage:
                        elsewhere.add(uid)
                    if task_plan.output_overwrite and not former.output_overwrite:
                        allowed.add(uid)
                    if self._texts.waits(uid):
                        self._texts.wait(self._tasks[uid].plan)
                    self._checkpoints.come_back(self._tasks[uid])
                else:
                    task = self._tasks[uid] = TaskRun(task_plan)
                    self._names[uid] = f"{task_plan.namespace}/{task_plan.name}"
                    if task_plan.digests:
                        self._texts.wait(task_plan)
                    else:
                        self._prepare(task)
            self._texts.reorder(wanted)
            self._prepare_complete()
            self._retrier.look_again(elsewhere | allowed, at_once=allowed)
            self._note_change()
            return True

    def take_text(self, digest: str, text: str) -> None:
        """Rows or a chat template that plans name by digest. What is not needed now is dropped."""
        with self._changed:
            self._texts.take(digest, text)
            self._prepare_complete()
            self._note_change()

    def wait_report(self, after: int, seconds: float) -> Report:
        """The report as soon as it is newer than ``after``, or as it is after ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._sequence > after, timeout=seconds)
            return self._report()

    def timeline(self, newest: int = 0) -> Timeline:
        """What all stages did lately, with about the ``newest`` microbatches; 0: all that is known. Asks them and waits, so
        it is called without the lock. Raises ``Unanswered``."""
        with self._changed:
            names = dict(self._names)
        return self._parts.timeline(names, newest)

    def wind_down(self) -> None:
        """Let the steps that have begun come back, bring every task's checkpoint to the store, then stop the stream."""
        with self._changed:
            self._dispatcher.wind_down()

    # --- rank 0's loop ------------------------------------------------------------------------------------------

    def supply(self) -> Entry | None:
        """Called by the mailbox with the lock held."""
        return self._dispatcher.supply()

    def returned(self, number: int, stats: Tensor) -> None:
        with self._changed:
            self._dispatcher.returned(number, stats)

    def faulted(self, fault: Fault) -> None:
        with self._changed:
            self._dispatcher.faulted(fault)

    def exported(self, stage: int, uid: str, tensors: dict[str, Tensor]) -> None:
        """A stage's part of an adapter; with the last part the adapter is published in the background."""
        with self._changed:
            task = self._tasks.get(uid)
            if task is None or task.phase is not TaskPhase.SAVING:
                return
            task.flight.parts[stage] = tensors
            if len(task.flight.parts) == len(self._parts.stages):
                gathered = task.flight.take_parts()
                if task.best is not None:
                    gathered = task.best.parts
                parts = [gathered[index] for index in sorted(gathered)]
                self._publisher.publish(task, task.outcome(), parts)

    def held_changed(self) -> None:
        """What a stage holds of tasks that do not train may have become less."""
        with self._changed:
            self._note_change()

    def evaluated(self, number: int, scores: Tensor) -> None:
        with self._changed:
            self._dispatcher.evaluated(number, scores)

    def keep(self, stage: int, uid: str, number: int, tensors: dict[str, Tensor]) -> None:
        """A stage's part of the adapter that evaluated best."""
        with self._changed:
            self._dispatcher.keep(stage, uid, number, tensors)

    def checkpointed(self, stage: int, uid: str, number: int, part: StageState) -> None:
        """A stage's part of a checkpoint; with the last part it is written in the background."""
        with self._changed:
            self._checkpoints.receive(stage, uid, number, part)

    # --- pools --------------------------------------------------------------------------------------------------

    def _prepare_complete(self) -> None:
        """Those whose texts are here now. With the lock held."""
        for plan in self._texts.complete():
            self._tasks[plan.uid].plan = plan
            self._prepare(self._tasks[plan.uid])

    def _prepare(self, task: TaskRun) -> None:
        """A task that has trained before is not failed by a store that is away or refuses it for a while; any other one is,
        so that a wrong address is known at once."""
        started = task.plan.started
        self._retrier.begin(
            self._parts.resuming if started else self._parts.preparing,
            Attempt(
                task,
                "fetching its rows and checkpoint" if started else "fetching its rows",
                work=partial(self._found, task),
                done=partial(self._prepared, task),
                lost=partial(self._lost, task),
                store=lambda: (*input_stores(task.plan), self._checkpoint_store(task.plan)),
                tries=None if started else FEW,
            ),
        )

    def _found(self, task: TaskRun) -> tuple[Found, int, TaskState | None]:
        """With the step of its newest checkpoint, 0 without one, and with a newer state that never got there."""
        plan = task.plan
        _, folder = self._open_checkpoints(plan)
        store = self._parts.open_store(plan.storage)
        facts = cache(lambda: self._checkpoints.facts(plan))  # two may ask, and the store is far
        made = prepare_task(
            plan,
            self._parts.base,
            store,
            checkpoints=folder,
            spool=self._parts.spool,
            rows=self._parts.rows,
            wanted=lambda: not task.withdrawn,
            day=lambda: day_in(facts()) or self._parts.today(),
            format=lambda: format_in(facts()),
        )
        if not isinstance(made, PreparedTask):
            return made, 0, None
        if made.initial is not None:
            made = replace(made, initial=self._laid_aside(made.initial))
        step = self._checkpoints.find(plan, made.fingerprint)
        return made, step, self._checkpoints.kept_state(plan, made.fingerprint, newer_than=step)

    def _laid_aside(self, initial: InitialState) -> InitialState:
        """A task may wait for long with it."""
        aside = self._parts.aside
        payloads = {stage: aside.put_bytes(part) for stage, part in initial.payloads.items()}
        return InitialState(aside.put(initial.own), payloads)

    def _prepared(self, task: TaskRun, found: tuple[Found, int, TaskState | None]) -> None:
        result, step, state = found
        with self._changed:
            task.checkpoint = task.checkpoint.found(step)
            if isinstance(result, AdapterInfo):
                task.publish(result)
                log.info("task %s is already published at %s", task.name, result.uri)
                self._publisher.forget(task)
            elif isinstance(result, FinishedAdapter):
                task.finish_with(result)
                log.info("task %s was finished by an earlier run and is being uploaded", task.name)
                self._publisher.upload(task, result)
            else:
                task.prepared, task.phase = result, TaskPhase.PREPARED
                if state is not None:
                    self._checkpoints.take_back(task, state)
            self._has_its_rows(task)
            self._note_change()

    def _has_its_rows(self, task: TaskRun) -> None:
        """Or will never have them: so the text that they were in is of no use any more. With the lock held."""
        if task.plan.dataset_text is not None:
            task.plan = task.plan.without_rows(fingerprint(task.plan))
        self._texts.done(task.uid)

    def _shapes_of(self, task: TaskPlan) -> Mapping[str, tuple[int, ...]]:
        return expected_tensors(resolve_targets(self._parts.base.facts, task.lora))

    def _checkpoint_store(self, task: TaskPlan) -> StoreIdentity:
        return output_store(task) if self._parts.open_checkpoints is None else PIPELINE_STORE

    def _below_output(self, task: TaskPlan) -> tuple[Store, str]:
        return self._parts.open_store(task.storage), join(task.output_uri, CHECKPOINTS_FOLDER)

    def _lost(self, task: TaskRun, error: Exception) -> None:
        """It cannot be prepared or published, or nobody wants that any more."""
        if isinstance(error, Withdrawn | Cancelled):
            return
        reason, message = reason_of(error)
        unknown = error if reason is FailureReason.INTERNAL_ERROR else None
        with self._changed:
            task.fail(reason, message)
            words = task.failure.message if task.failure is not None else ""  # as it may be shown
            self._has_its_rows(task)
            self._note_change()
        log.warning("task %s failed: %s: %s", task.name, reason, words, exc_info=unknown)

    # --- with the lock held -------------------------------------------------------------------------------------

    def _note_change(self) -> None:
        for uid in [uid for uid, task in self._tasks.items() if task.withdrawn and not task.in_stream]:
            self._texts.done(uid)
            self._publisher.forget_kept(self._tasks.pop(uid))
        for task in self._tasks.values():
            diverged = task.failure is not None and task.failure.reason is FailureReason.NON_FINITE_LOSS
            if diverged and task.checkpoint.stored_step:  # what led there is of no use
                task.checkpoint = task.checkpoint.found(0)
                self._publisher.forget(task)
        self._sequence += 1
        self._parts.meter.training(any(task.in_stream for task in self._tasks.values()))
        self._changed.notify_all()

    def _change(self, call: Callable[[], None]) -> None:
        """For a thread that has been away without the lock."""
        with self._changed:
            call()
            self._note_change()

    def _report(self) -> Report:
        reports = [safe_report(task) for task in self._tasks.values()]
        if any(failed for _, failed in reports):
            self._note_change()
        return Report(
            run_id=self._parts.run_id,
            sequence=self._sequence,
            plan_generation=self._generation,
            ready=True,
            facts=self._parts.base.facts,
            stages=self._parts.stages,
            tasks=(
                *(report for report, _ in reports),
                *(not_understood(uid, what) for uid, what in self._unsupported.items()),
            ),
            memory=self._parts.memory(),
            held=held if any(held := self._parts.held()) else None,
            exhausted=self._dispatcher.exhausted,
            lacks=self._texts.lacks,
            wire=self._dispatcher.wire(*self._parts.wire()),
        )
