"""Tasks of this machine, trained as ``mlora run`` trains them.

There is no operator that works between two calls: ``submit`` checks a task and notes it, and ``wait`` trains all that were
submitted until then, together.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlora.backend import JSON, Seen
from mlora.background import run_to_end
from mlora_operator.api.meta import timestamp
from mlora_operator.cli import exit_codes
from mlora_operator.cli.fetch.adapter_of_task import access_to, spec_of
from mlora_operator.cli.logs.story import Story, StoryLine
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.run.command import check_worker, log_to, world_of
from mlora_operator.cli.task_table import row
from mlora_operator.download import Access
from mlora_operator.local.adapt import RunInputs, RunOptions
from mlora_operator.local.ending import End
from mlora_operator.local.machine import this_machine
from mlora_operator.local.manifests import (
    FileContents,
    Manifest,
    Manifests,
    TaskManifest,
    read_file,
    together,
)
from mlora_operator.local.run_environment import RunEnvironment, models_folder
from mlora_operator.reconcile.state.decision import Event

_KEPT_EVENTS = 1_000  # of all tasks together

_Object = tuple[str, str, str]  # kind, namespace and name


@dataclass(frozen=True)
class _Given:
    """A manifest by name and content, read once, however many come after it."""

    text: tuple[str, str] | None  # None: some of it was deleted or replaced
    file: FileContents = field(repr=False)
    names: Sequence[str]  # of its tasks

    @staticmethod
    def read(text: tuple[str, str]) -> _Given:
        file = read_file(*text)
        return _Given(text, file, _names(file))

    def without(self, tasks: Collection[str], objects: Collection[_Object]) -> _Given | None:
        """What is left of it without these, such as Secrets and other tasks. None where that is nothing."""
        found = tuple(
            one
            for one in self.file.found
            if _object(one) not in objects and not (isinstance(one, TaskManifest) and one.place.name in tasks)
        )
        if found == self.file.found:
            return self
        file = FileContents(found, self.file.others, self.file.problems)
        return _Given(None, file, _names(file)) if found or file.others else None


def _names(file: FileContents) -> list[str]:
    return [one.place.name for one in together([file]).tasks]


def _object(one: Manifest) -> _Object:
    return one.place.kind, one.place.namespace, one.place.name


class LocalBackend:
    def __init__(
        self, options: RunOptions, state: Path | None, given: Sequence[tuple[str, str]] = ()
    ) -> None:
        """``given``: manifests that are there from the start, such as Secrets."""
        self._options = options
        self._state = state if state is not None else Path(tempfile.mkdtemp(prefix="mlora-client-"))
        self._given = [_Given.read(text) for text in given]
        self._tasks: dict[str, dict[str, Any]] = {}  # as kubectl would show them
        self._ended: dict[str, End] = {}
        self._events: list[tuple[str, dict[str, Any]]] = []  # with the name of their task

    def submit(self, texts: Sequence[tuple[str, str]], *, replace: bool) -> list[str]:
        new = [_Given.read(text) for text in texts]
        names = [name for one in new for name in one.names]
        former = [name for name in names if name in self._tasks]
        if former and not replace and all(self._knows(one) for one in new):
            return names
        if former and not replace:
            message = f"loratask/{former[0]} was submitted already with another spec: give replace=True"
            raise CommandError(message, exit_codes.REFUSED)
        all_given = [*self._without(former, new if replace else ()), *new]
        self._world(all_given, names)
        self._given = all_given
        for name in names:
            self._ended.pop(name, None)
            self._tasks[name] = {}
        return names

    def wait(self, names: Sequence[str], seconds: float | None, seen: Seen) -> None:
        for name in names:
            self._submitted(name)
        pending = [name for name in self._tasks if name not in self._ended]
        if set(names) & set(pending):
            self._train(self._world(self._given, pending), seconds, seen)
        bad = [self._ended[name] for name in names if self._ended[name].bad]
        if bad:
            words = [f"loratask/{end.name} {end.result.value.lower()}: {end.cause}" for end in bad]
            more = f"state and logs: {self._state}"
            raise CommandError("\n".join([*words, more]), exit_codes.FAILED)

    def tasks(self, labels: str | None) -> list[JSON]:
        if labels is not None:
            raise CommandError("labels select tasks of a cluster only", exit_codes.INVALID)
        return [task for task in self._tasks.values() if task]

    def task(self, name: str) -> JSON:
        found = self._submitted(name)
        if not found:
            message = f"loratask/{name} has not trained yet: that begins with wait()"
            raise CommandError(message, exit_codes.NOT_FOUND)
        return found

    def story(self, name: str) -> list[StoryLine]:
        events = [event for about, event in self._events if about == name]
        return list(Story(0).news(self.task(name), events, datetime.now(UTC)))

    def adapter(self, name: str) -> tuple[str, Access, str]:
        task = self.task(name)
        shown = row(task)
        if not shown.succeeded:
            message = f"loratask/{name} has no adapter: it is {shown.state}"
            raise CommandError(message, exit_codes.NOT_FOUND)
        spec = spec_of(dict(task))
        keys: Mapping[str, str] = {}
        if spec.storage.secret_ref is not None:
            secrets = _together(self._given).secrets
            keys = next(one.data for one in secrets if one.place.name == spec.storage.secret_ref.name)
        access = access_to(spec, keys, self._options.s3_endpoint)
        return shown.adapter or spec.output.uri, access, task["metadata"]["uid"]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._submitted(name)
        self._given = self._without(names)
        for name in dict.fromkeys(names):
            self._tasks.pop(name)
            self._ended.pop(name, None)

    def _knows(self, one: _Given) -> bool:
        """The very text, or tasks of the same specs: labels mean nothing here."""
        if any(one.text == known.text for known in self._given):
            return True
        new = _together([one])
        if new.pipelines or new.secrets or new.others or new.problems:
            return False
        former = {task.place.name: task.spec for task in _together(self._given).tasks}
        return all(former.get(task.place.name) == task.spec for task in new.tasks)

    def _without(self, names: Sequence[str], instead: Sequence[_Given] = ()) -> list[_Given]:
        """All but these tasks, and the objects that others come ``instead`` of."""
        objects = {_object(one) for new in instead for one in new.file.found}
        left = [one.without(names, objects) for one in self._given]
        return [one for one in left if one is not None]

    def _submitted(self, name: str) -> dict[str, Any]:
        if name not in self._tasks:
            raise CommandError(f"no loratask {name!r} was submitted here", exit_codes.NOT_FOUND)
        return self._tasks[name]

    def _world(self, given: Sequence[_Given], names: Sequence[str]) -> RunInputs:
        """Of these tasks alone. Raises CommandError for what is wrong with any."""
        found = _together(given)
        wanted = tuple(one for one in found.tasks if one.place.name in names)
        only = Manifests(wanted, found.pipelines, found.secrets, found.others, found.problems)
        return world_of(only, self._options, this_machine(os.environ))

    def _train(self, world: RunInputs, seconds: float | None, seen: Seen) -> None:
        from mlora_operator.local.run import run  # its HTTP client takes a second to load

        check_worker()
        place = RunEnvironment(
            state=self._state,
            cache=models_folder(os.environ),
            machine=this_machine(os.environ),
            environment=dict(os.environ),
        )

        async def train() -> list[End]:
            async with asyncio.timeout(seconds):
                return await run(world, place, _Listener(self, seen))

        self._log()
        try:
            ends = run_to_end(train)
        except TimeoutError:
            message = f"not all tasks finished within {seconds:g} seconds; state and logs: {self._state}"
            raise CommandError(message, exit_codes.TIMEOUT) from None
        self._ended |= {end.name: end for end in ends}

    def _log(self) -> None:
        """Raises CommandError where the folder cannot be written."""
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            log_to(self._state / "operator.log")
        except OSError as error:
            raise CommandError(f"{self._state}: {error.strerror}", exit_codes.INVALID) from error

    def note_task(self, task: JSON) -> None:
        self._tasks[task["metadata"]["name"]] = dict(task)

    def note_event(self, event: Event) -> None:
        now = timestamp(datetime.now(UTC))
        told = {"type": event.type, "reason": event.reason, "message": event.message, "lastTimestamp": now}
        self._events = [*self._events[1 - _KEPT_EVENTS :], (event.about.name, told)]


class _Listener:
    """Hears how a run goes, in the run's thread."""

    def __init__(self, backend: LocalBackend, seen: Seen) -> None:
        self._backend = backend
        self._seen = seen

    def task_changed(self, task: JSON) -> None:
        self._backend.note_task(task)
        self._seen(task)

    def happened(self, event: Event) -> None:
        self._backend.note_event(event)


def _together(given: Sequence[_Given]) -> Manifests:
    return together([one.file for one in given])
