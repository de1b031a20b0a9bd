"""Tasks of this machine, trained as ``mlora run`` trains them.

There is no operator that works between two calls: ``submit`` checks a task and notes it, and ``wait`` trains all that were
submitted until then, together.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from mlora_operator.cli.run.command import log_to, world_of
from mlora_operator.cli.task_table import row
from mlora_operator.download import Access
from mlora_operator.local.adapt import RunInputs, RunOptions
from mlora_operator.local.ending import End
from mlora_operator.local.machine import this_machine
from mlora_operator.local.manifests import Manifests, read_manifests
from mlora_operator.local.run_environment import RunEnvironment
from mlora_operator.reconcile.state.decision import Event

_KEPT_EVENTS = 1_000  # of all tasks together


class LocalBackend:
    def __init__(
        self, options: RunOptions, state: Path | None, given: Sequence[tuple[str, str]] = ()
    ) -> None:
        """``given``: manifests that are there from the start, such as Secrets."""
        self._options = options
        self._state = state if state is not None else Path(tempfile.mkdtemp(prefix="mlora-client-"))
        self._texts: list[tuple[str, str]] = list(given)
        self._tasks: dict[str, dict[str, Any]] = {}  # as kubectl would show them
        self._ended: dict[str, End] = {}
        self._events: list[tuple[str, dict[str, Any]]] = []  # with the name of their task

    def submit(self, texts: Sequence[tuple[str, str]], *, replace: bool) -> list[str]:
        new = read_manifests(texts)
        names = [one.place.name for one in new.tasks]
        former = [name for name in names if name in self._tasks]
        if former and not replace and all(self._knows(text) for text in texts):
            return names
        if former and not replace:
            message = f"loratask/{former[0]} was submitted already with another spec: give replace=True"
            raise CommandError(message, exit_codes.REFUSED)
        known = [one for one in self._texts if not set(_names(one)) & set(former)]
        self._world([*known, *texts], names)
        self._texts = [*known, *texts]
        for name in names:
            self._ended.pop(name, None)
            self._tasks[name] = {}
        return names

    def wait(self, names: Sequence[str], seconds: float | None, seen: Seen) -> None:
        for name in names:
            self._submitted(name)
        pending = [name for name in self._tasks if name not in self._ended]
        if set(names) & set(pending):
            self._train(self._world(self._texts, pending), seconds, seen)
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
            secrets = read_manifests(self._texts).secrets
            keys = next(one.data for one in secrets if one.place.name == spec.storage.secret_ref.name)
        access = access_to(spec, keys, self._options.s3_endpoint)
        return shown.adapter or spec.output.uri, access, task["metadata"]["uid"]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._submitted(name)
        self._texts = [one for one in self._texts if not set(_names(one)) & set(names)]
        for name in names:
            self._tasks.pop(name)
            self._ended.pop(name, None)

    def _knows(self, text: tuple[str, str]) -> bool:
        """The very text, or tasks of the same specs: labels mean nothing here."""
        if text in self._texts:
            return True
        new = read_manifests([text])
        if new.pipelines or new.secrets or new.others or new.problems:
            return False
        former = {one.place.name: one.spec for one in read_manifests(self._texts).tasks}
        return all(former.get(one.place.name) == one.spec for one in new.tasks)

    def _submitted(self, name: str) -> dict[str, Any]:
        if name not in self._tasks:
            raise CommandError(f"no loratask {name!r} was submitted here", exit_codes.NOT_FOUND)
        return self._tasks[name]

    def _world(self, texts: Sequence[tuple[str, str]], names: Sequence[str]) -> RunInputs:
        """Of these tasks alone. Raises CommandError for what is wrong with any."""
        found = read_manifests(texts)
        wanted = tuple(one for one in found.tasks if one.place.name in names)
        only = Manifests(wanted, found.pipelines, found.secrets, found.others, found.problems)
        return world_of(only, self._options, this_machine(os.environ))

    def _train(self, world: RunInputs, seconds: float | None, seen: Seen) -> None:
        from mlora_operator.local.run import run  # its HTTP client takes a second to load

        if importlib.util.find_spec("torch") is None:
            message = "training needs the worker: run pip install 'mlora-operator[worker]'"
            raise CommandError(message, exit_codes.INVALID)
        place = RunEnvironment(
            state=self._state,
            cache=Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlora" / "models",
            machine=this_machine(os.environ),
            environment=dict(os.environ),
        )

        async def train() -> list[End]:
            async with asyncio.timeout(seconds):
                return await run(world, place, _Listener(self, seen))

        with self._logging():
            try:
                ends = run_to_end(train)
            except TimeoutError:
                message = f"not all tasks finished within {seconds:g} seconds; state and logs: {self._state}"
                raise CommandError(message, exit_codes.TIMEOUT) from None
        self._ended |= {end.name: end for end in ends}

    @contextmanager
    def _logging(self) -> Iterator[None]:
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            log_to(self._state / "operator.log")
        except OSError as error:
            raise CommandError(f"{self._state}: {error.strerror}", exit_codes.INVALID) from error
        yield

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


def _names(text: tuple[str, str]) -> list[str]:
    return [one.place.name for one in read_manifests([text]).tasks]
