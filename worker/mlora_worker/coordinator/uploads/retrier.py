"""Trying again what may pass, a store's refusal or what the machine lacks: with growing pauses, with the newest keys, for
as long as the task is wanted.

Nobody sleeps in a pool, and nobody waits for another's store: ``fair_queue`` says who may try next. Whoever waits for a
store that gives no answer says so in its task's report, and keeps what it has on this rank's own volume meanwhile: its turn
may be long in coming.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from mlora_worker.coordinator.task.failure_reason import blocked_by, is_the_machines
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.coordinator.uploads.fair_queue import FairQueue, Ticket, pauses
from mlora_worker.runtime.log_lines import about
from mlora_worker.storage.errors import StorageError, StoreBusy, StoreUnreachable, UselessAnswer

log = logging.getLogger(__name__)

Result = TypeVar("Result")
CallLater = Callable[[float, Callable[[], None]], None]  # in so many seconds, and returns at once

FEW = 6  # tries of what has an end
_WAITS = "waits for its store"
_FAILED = "failed and is retried"


class Withdrawn(Exception):
    """Nobody wants it any more."""


@dataclass(slots=True, eq=False)
class WorkPool:
    """Threads for one kind of work, and who may have one."""

    threads: Executor
    queue: FairQueue
    wakes_at: float | None = None  # a call is put off until then


@dataclass(frozen=True, slots=True)
class Attempt(Generic[Result]):
    """What is to be done for a task. All its functions are called in a pool's threads, without the lock, but ``store``."""

    task: TaskRun
    what: str  # such as "uploading the adapter"
    work: Callable[[], Result]  # opens its store anew, so that it has the keys of the newest plan
    done: Callable[[Result], None]
    lost: Callable[[Exception], None]  # told ``Withdrawn``, or an error that no further try would mend
    store: Callable[[], Hashable] = lambda: (
        None
    )  # which one it wants by the newest plan; None: none. Asks nobody
    # None: whatever its store says may pass, and meanwhile the task's report says why it waits. Else a store that gives no
    # answer, and a machine that lacks something, are tried so often in all, and any other error is final. Tries at a busy
    # store do not count, and the report says until when it waits.
    tries: int | None = None
    keep: Callable[[], None] | None = None  # on this rank's own volume, while its store is silent
    cleans: bool = False  # it is wanted though the task is not

    def may_pass(self, error: Exception) -> bool:
        passing = StorageError if self.tries is None else StoreUnreachable
        return isinstance(error, passing) or is_the_machines(error)


@dataclass(slots=True, eq=False)
class _Try:
    attempt: Attempt[Any]
    pool: WorkPool
    ticket: Ticket
    pauses: Iterator[float] = field(init=False)  # that are left
    keeps: bool = False  # it goes to no store now
    speaks: bool = False  # the task's report says why it waits

    def __post_init__(self) -> None:
        tries = self.attempt.tries
        self.speaks = tries is None
        self.pauses = pauses() if tries is None else islice(pauses(), tries - 1)

    def want_store(self, *, keeps: bool = False) -> None:
        """By the newest plan. Neither what nobody wants any more, nor what is only to be kept, waits for a store."""
        self.keeps = keeps
        free = keeps or (self.attempt.task.withdrawn and not self.attempt.cleans)
        self.ticket.store = None if free else self.attempt.store()


class UploadRetrier:
    """``changed`` guards the tasks' state. ``on_change`` is called with it held; it may be held while ``_lock`` is waited
    for, and never the other way round.
    """

    def __init__(
        self,
        *,
        changed: threading.Condition,
        on_change: Callable[[], None],
        later: CallLater,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed, self._on_change, self._later, self._clock = changed, on_change, later, clock
        self._lock = threading.Lock()  # guards the pools' queues and all below
        self._now = 0.0  # never earlier than what was put off until then
        self._tries: dict[Ticket, _Try] = {}

    def begin(self, pool: WorkPool, attempt: Attempt[Result]) -> None:
        """With the lock held or without it."""
        one = _Try(attempt, pool, Ticket(attempt.task.plan.namespace, None))
        one.want_store()
        with self._lock:
            self._tries[one.ticket] = one
            silence = pool.queue.silence_of(one.ticket)
            if silence is not None and attempt.keep is not None:
                one.want_store(keeps=True)
            pool.queue.enter(one.ticket, self._time())
        if silence is not None:
            self._block([one], silence, _WAITS)
        self._advance(pool)

    def look_again(self, tasks: Collection[str], at_once: Collection[str] = ()) -> None:
        """These tasks' plans have changed: whoever waits for a store that is no longer wanted, or with keys that are new,
        does so no longer; nor do those ``at_once``. With the lock held."""
        with self._lock:
            now = self._time()
            found = [one for one in self._tries.values() if one.attempt.task.uid in tasks]
            for one in found:
                former = one.ticket.store
                if one.keeps or not one.pool.queue.leave(one.ticket):
                    continue
                one.want_store()
                if one.ticket.store != former or one.attempt.task.uid in at_once:
                    one.ticket.rests_until = now
                one.pool.queue.enter(one.ticket, now)
        for pool in dict.fromkeys(one.pool for one in found):
            self._advance(pool)

    # --- who is next ------------------------------------------------------------------------------------------------

    def _advance(self, pool: WorkPool, at: float = 0.0) -> None:
        """Give threads to those that may have one. ``at``: it is no earlier."""
        with self._lock:
            now = self._now = max(at, self._time())
            if pool.wakes_at is not None and pool.wakes_at <= now:
                pool.wakes_at = None
            begun = [self._tries[ticket] for ticket in pool.queue.begin(now)]
            wake = pool.queue.wake_at(now)
            if wake is not None and pool.wakes_at is not None and pool.wakes_at <= wake:
                wake = None
            elif wake is not None:
                pool.wakes_at = wake
        for one in begun:
            pool.threads.submit(self._run, one)
        if wake is not None:
            self._later(wake - now, partial(self._advance, pool, wake))

    def _time(self) -> float:
        return max(self._now, self._clock())

    # --- in a pool's thread -------------------------------------------------------------------------------------------

    def _run(self, one: _Try) -> None:
        with about(one.attempt.task.plan):
            try:
                if one.keeps:
                    self._kept(one)
                else:
                    self._try(one)
            finally:
                self._advance(one.pool)

    def _kept(self, one: _Try) -> None:
        assert one.attempt.keep is not None
        try:
            one.attempt.keep()
        except Exception:  # its own try may go better
            log.exception("the state of %s is only in memory", one.attempt.task.name)
        with self._lock:
            one.pool.queue.ended(one.ticket, self._time())
            one.want_store()
            one.pool.queue.enter(one.ticket, self._time())

    def _try(self, one: _Try) -> None:
        attempt, task = one.attempt, one.attempt.task
        try:
            if task.withdrawn and not attempt.cleans:
                raise Withdrawn(task.name)
            result = attempt.work()
        except Exception as error:
            self._failed(one, error)
            return
        try:
            if one.speaks:
                with self._changed:
                    if task.blocked is not None:
                        task.blocked = None
                        self._on_change()
            attempt.done(result)
        finally:
            self._end(one, answered=True)

    def _end(self, one: _Try, *, answered: bool) -> None:
        with self._lock:
            del self._tries[one.ticket]
            one.pool.queue.ended(one.ticket, self._time(), answered=answered)

    def _failed(self, one: _Try, error: Exception) -> None:
        attempt, queue = one.attempt, one.pool.queue
        rest = error.seconds if isinstance(error, StoreBusy) else None
        seconds = rest
        if rest is None:
            seconds = next(one.pauses, None) if attempt.may_pass(error) else None
        # Of a useless answer others learn that the store answers, and nothing else.
        is_silent = isinstance(error, StoreUnreachable) and not isinstance(error, UselessAnswer)
        silence = error if is_silent else None
        with self._lock:
            now = self._time()
            answered = silence is None and isinstance(error, StorageError)
            waiting = queue.ended(one.ticket, now, answered=answered, silence=silence, rest=rest or 0.0)
            others = [self._tries[ticket] for ticket in waiting]
            if seconds is None:
                del self._tries[one.ticket]
            else:
                one.ticket.failures += 1
                one.ticket.rests_until = now + seconds
                one.want_store()
                queue.enter(one.ticket, now)
        if seconds is not None:
            message = blocked_by(attempt.task, error)[1]
            log.warning(
                "%s of %s failed, next attempt in %.0f s: %s",
                attempt.what,
                attempt.task.name,
                seconds,
                message,
            )
            self._block([one], error, _FAILED if rest is None else _WAITS)
        if silence is not None:
            self._announce_silence(others, silence)
        if seconds is None:
            attempt.lost(error)

    def _announce_silence(self, waiting: list[_Try], silence: Exception) -> None:
        """To those that wait for a store that was found silent: it is as if each had tried itself."""
        self._block(waiting, silence, _WAITS)
        for one in waiting:
            if isinstance(silence, StoreBusy) or one.attempt.tries is None:
                continue
            if next(one.pauses, None) is None and self._taken_out(one):
                with about(one.attempt.task.plan):
                    one.attempt.lost(silence)
        with self._lock:
            for one in waiting:
                if one.attempt.keep is not None and one.pool.queue.leave(one.ticket):
                    one.want_store(keeps=True)
                    one.pool.queue.enter(one.ticket, self._time())

    def _block(self, waiting: list[_Try], error: Exception, how: str) -> None:
        """Those of them that still wait: whoever goes on says so itself, after this."""
        for one in waiting:
            one.speaks = one.speaks or isinstance(error, StoreBusy)
        speaking = [one for one in waiting if one.speaks]
        if not speaking:
            return
        with self._changed:
            for one in speaking:
                attempt = one.attempt
                with self._lock:
                    waits = one.pool.queue.waits(one.ticket)
                if waits:
                    reason, message = blocked_by(attempt.task, error)
                    attempt.task.block(reason, f"{attempt.what} {how}: {message}")
            self._on_change()

    def _taken_out(self, one: _Try) -> bool:
        with self._lock:
            if not one.pool.queue.leave(one.ticket):
                return False
            del self._tries[one.ticket]
            return True
