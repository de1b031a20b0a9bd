"""Who answers a request: bytes with their ETag, made once for each pass of the loop. One thread's."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from multidict import MultiMapping

from mlora_operator.page import answers
from mlora_operator.page.board import Board, LastDecision
from mlora_operator.page.documents import Trouble
from mlora_operator.page.order import Lists, arrange
from mlora_operator.page.timelines import timeline_document
from mlora_operator.reconcile.ports import Endpoint
from mlora_operator.reconcile.state.snapshot import Key
from mlora_worker.protocol import Message
from mlora_worker.stream.timeline import Timeline

AT_MOST_EVERY = 0.5  # seconds: passes that follow each other faster are looked at no faster
KEPT = 64  # answers of the present pass
LARGEST_OFFSET = 1_000_000
LONGEST_QUERY = 1024  # characters of all parameters
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class RequestError(Exception):
    """A request that gets no answer but ``trouble``."""

    def __init__(self, status: int, trouble: Trouble) -> None:
        super().__init__(trouble.message)
        self.status = status
        self.trouble = trouble


@dataclass(frozen=True, slots=True)
class PageAnswer:
    body: bytes
    etag: str  # with its quotes


def answer(document: Message) -> PageAnswer:
    return tagged(document.to_json().encode())


def tagged(body: bytes) -> PageAnswer:
    return PageAnswer(body, f'"{hashlib.sha256(body).hexdigest()[:20]}"')


@dataclass(frozen=True, slots=True)
class _Present:
    taken: float
    sight: LastDecision
    lists: Lists


class PageService:
    """``leader``: who leads while this replica does not; empty where that is not known."""

    def __init__(
        self,
        board: Board,
        leader: Callable[[], str],
        now: Callable[[], datetime],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._leader = leader
        self._now = now
        self._monotonic = monotonic
        self._present: _Present | None = None
        self._made: dict[tuple[object, ...], PageAnswer] = {}

    def overview(self, query: Mapping[str, str]) -> PageAnswer:
        """Raises Refused, as all the others do."""
        present, namespace = self._look(), _namespace(query)
        return self._kept(
            ("overview", namespace),
            lambda: answers.overview(present.sight, present.lists, namespace),
        )

    def tasks(self, query: Mapping[str, str]) -> PageAnswer:
        present, namespace = self._look(), _namespace(query)
        name = query.get("list", "waiting")
        if name not in ("waiting", "training", "finished"):
            raise _bad("list must be waiting, training or finished")
        offset = _number(query, "offset", 0, 0, LARGEST_OFFSET)
        limit = _number(query, "limit", 25, 1, answers.MOST_TASKS)
        return self._kept(
            ("tasks", name, namespace, offset, limit),
            lambda: answers.tasks(
                present.lists,
                self._board.colours(),
                cast(answers.ListName, name),
                namespace,
                offset,
                limit,
            ),
        )

    def losses(self, query: Mapping[str, str]) -> PageAnswer:
        present, namespace = self._look(), _namespace(query)
        limit = _number(query, "limit", answers.MOST_CURVES, 1, answers.MOST_CURVES)

        def made() -> Message:
            able = answers.with_curves(present.lists, self._board.colours(), namespace)
            chosen = able[:limit]
            curves = self._board.curves([one.task.uid for one in chosen])
            return answers.losses(chosen, len(able), curves)

        return self._kept(("losses", namespace, limit), made)

    def coordinator(self, query: Mapping[str, str]) -> tuple[Key, Endpoint, int]:
        """Of the pipeline whose timeline is asked for, with its number of stages."""
        present, namespace = self._look(), _namespace(query)
        parts = query.get("pipeline", "").split("/")
        if len(parts) != 2 or not _NAMESPACE.fullmatch(parts[0]) or not _NAME.fullmatch(parts[1]):
            raise _bad("pipeline must be NAMESPACE/NAME")
        key = Key(*parts)
        view = next((one for one in present.lists.views if one.pipeline.key == key), None)
        if view is None or view.pipeline.spec is None or not _may_see(view.pipeline.key, namespace, present):
            raise RequestError(404, Trouble(error="notFound", message="the pipeline does not exist"))
        endpoint = present.sight.endpoints.get(key)
        if endpoint is None:
            raise unreachable(key)
        return key, endpoint, view.pipeline.spec.stages

    def timeline(self, key: Key, timeline: Timeline, query: Mapping[str, str]) -> PageAnswer:
        present, namespace = self._look(), _namespace(query)
        uids = {uid for span in timeline.spans for uid in span.tasks}
        names = {
            task.uid: str(task.key)
            for task in present.sight.tasks
            if task.uid in uids and namespace in (None, task.key.namespace)
        }
        return answer(timeline_document(str(key), timeline, names, self._board.colours()))

    def _look(self) -> _Present:
        """The newest pass, with its tasks in order."""
        sight = self._board.sight()
        if sight is None:
            self._present = None
            self._made.clear()
            leader = self._leader()
            if leader:
                message = f"another replica leads: {leader}"
                raise RequestError(503, Trouble(error="following", message=message, leader=leader))
            raise RequestError(
                503,
                Trouble(
                    error="starting",
                    message="the operator is starting; no data yet",
                ),
            )
        present, moment = self._present, self._monotonic()
        newer = present is None or present.sight.number != sight.number
        if present is None or (newer and moment - present.taken >= AT_MOST_EVERY):
            present = self._present = _Present(moment, sight, arrange(sight, self._now()))
            self._made.clear()
        return present

    def _kept(self, question: tuple[object, ...], make: Callable[[], Message]) -> PageAnswer:
        known = self._made.get(question)
        if known is None:
            if len(self._made) >= KEPT:
                self._made.clear()
            known = self._made[question] = answer(make())
        return known


def unreachable(key: Key) -> RequestError:
    """Without what the client says: it names addresses."""
    message = f"the coordinator of {key} does not respond"
    return RequestError(504, Trouble(error="unreachable", message=message))


def _may_see(key: Key, namespace: str | None, present: _Present) -> bool:
    if namespace is None or key.namespace == namespace:
        return True
    everyone = (*present.lists.training, *present.lists.waiting, *present.lists.finished)
    here = str(key)
    return any(one.task.key.namespace == namespace and one.status.pipeline == here for one in everyone)


def asked(query: MultiMapping[str], *names: str) -> Mapping[str, str]:
    """A request's parameters. Each may stand once: of two, a proxy that confines a team to its namespace and this page
    could read another one. Raises Refused, also for parameters that are not among ``names``, and for what is too long.
    """
    if sum(len(name) + len(value) for name, value in query.items()) > LONGEST_QUERY:
        raise _bad(f"the parameters have more than {LONGEST_QUERY} characters")
    for name in query:
        if name not in names:
            raise _bad(f"unknown parameter; valid are {', '.join(names)}")
        if len(query.getall(name)) > 1:
            raise _bad(f"{name} must be given only once")
    return dict(query)


def _namespace(query: Mapping[str, str]) -> str | None:
    """None: all. An empty name is refused: a proxy that confines a team by this parameter, and whose variable is empty,
    would show all namespaces."""
    namespace = query.get("namespace")
    if namespace is not None and not _NAMESPACE.fullmatch(namespace):
        raise _bad("namespace must be the name of a namespace; leave it out to see all")
    return namespace


def _number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) <= most):
        raise _bad(f"{name} must be a whole number from {least} to {most}")
    return int(text)


def _bad(message: str) -> RequestError:
    return RequestError(400, Trouble(error="badRequest", message=message))
