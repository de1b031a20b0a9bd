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

from mlora_operator.page import answers, usage
from mlora_operator.page.board import Board, LastDecision
from mlora_operator.page.choosing import Choice, chosen, words_of
from mlora_operator.page.curves import POINTS
from mlora_operator.page.detail import task_detail
from mlora_operator.page.documents import Trouble
from mlora_operator.page.order import Lists, arrange
from mlora_operator.page.timelines import timeline_document
from mlora_operator.reconcile.ports import Endpoint
from mlora_operator.reconcile.state.snapshot import Key
from mlora_worker.protocol import Message
from mlora_worker.stream.timeline import Timeline

AT_MOST_EVERY = 0.5  # seconds: passes that follow each other faster are looked at no faster ...
CALM = 4  # ... nor before this many times as long has passed as to put the tasks in order took
KEPT = 64  # answers of the present pass
LARGEST_OFFSET = 1_000_000
LONGEST_QUERY = 1024  # characters of all parameters
LONGEST_SEARCH = 100
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_STATE = re.compile(r"[A-Za-z]{1,40}")
_UID = re.compile(r"[-.A-Za-z0-9]{1,64}")


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
    until: float  # a newer pass is not looked at before
    sight: LastDecision
    lists: Lists


class PageService:
    """``leader``: who leads while this replica does not; empty where that is not known. ``in_cluster``: `mlora fetch` finds
    tasks by their names.
    """

    def __init__(
        self,
        board: Board,
        leader: Callable[[], str],
        now: Callable[[], datetime],
        monotonic: Callable[[], float] = time.monotonic,
        *,
        in_cluster: bool = True,
    ) -> None:
        self._in_cluster = in_cluster
        self._board = board
        self._leader = leader
        self._now = now
        self._monotonic = monotonic
        self._present: _Present | None = None
        self._made: dict[tuple[object, ...], PageAnswer] = {}

    def overview(self, query: Mapping[str, str]) -> PageAnswer:
        """Raises RequestError, as all the others do."""
        present, namespace = self._look(), _namespace(query)
        return self._kept(
            ("overview", namespace),
            lambda: answers.overview(present.sight, present.lists, namespace),
        )

    def tasks(self, query: Mapping[str, str]) -> PageAnswer:
        present, choice = self._look(), _choice(query)
        name = query.get("list", "waiting")
        if name not in ("waiting", "training", "finished"):
            raise _bad("list must be waiting, training or finished")
        offset, limit = _part(query)
        return self._kept(
            ("tasks", name, choice, offset, limit),
            lambda: answers.tasks(
                present.lists,
                self._board.colours(),
                cast(answers.ListName, name),
                choice,
                offset,
                limit,
            ),
        )

    def losses(self, query: Mapping[str, str]) -> PageAnswer:
        """Of those that the reader chose, or of tasks that are named by ``uids``, with all points that there are."""
        present, choice = self._look(), _choice(query)
        limit = _number(query, "limit", answers.MOST_CURVES, 1, answers.MOST_CURVES)
        uids = _uids(query)

        def made() -> Message:
            able = answers.with_curves(present.lists, self._board.colours(), choice)
            if uids:
                by_uid = {one.task.uid: one for one in able}
                shown, points = [by_uid[uid] for uid in uids if uid in by_uid], POINTS
            else:
                shown, points = able[:limit], answers.POINTS_SHOWN
            curves = self._board.curves([one.task.uid for one in shown])
            return answers.losses(shown, len(able), curves, points)

        return self._kept(("losses", choice, limit, uids), made)

    def namespaces(self, query: Mapping[str, str]) -> PageAnswer:
        present, namespace = self._look(), _namespace(query)
        offset, limit = _part(query)
        return self._kept(
            ("namespaces", namespace, offset, limit),
            lambda: usage.namespaces(
                chosen(present.lists, present.lists.everyone, Choice(namespace)), offset, limit
            ),
        )

    def task(self, query: Mapping[str, str]) -> PageAnswer:
        """Of one task. To a reader of one namespace, the tasks of all others do not exist."""
        present, namespace = self._look(), _namespace(query)
        key = _key(query, "task")
        if namespace not in (None, key.namespace):
            raise _missing("task")

        def made() -> Message:
            one = next((one for one in present.lists.everyone if one.task.key == key), None)
            if one is None:
                raise _missing("task")
            uid = one.task.uid
            drawn = self._board.curves([uid]).get(uid)
            return task_detail(one, drawn, self._board.events(uid), by_name=self._in_cluster)

        return self._kept(("task", key), made)

    def coordinator(self, query: Mapping[str, str]) -> tuple[Key, Endpoint, int]:
        """Of the pipeline whose timeline is asked for, with its number of stages."""
        present, namespace = self._look(), _namespace(query)
        key = _key(query, "pipeline")
        view = next((one for one in present.lists.views if one.pipeline.key == key), None)
        if view is None or view.pipeline.spec is None or not _may_see(view.pipeline.key, namespace, present):
            raise _missing("pipeline")
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
        if present is None or (present.sight.number != sight.number and moment >= present.until):
            lists = arrange(sight, self._now())
            rest = max(AT_MOST_EVERY, CALM * (self._monotonic() - moment))
            present = self._present = _Present(moment + rest, sight, lists)
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


def _missing(what: str) -> RequestError:
    return RequestError(404, Trouble(error="notFound", message=f"the {what} does not exist"))


def _may_see(key: Key, namespace: str | None, present: _Present) -> bool:
    if namespace is None or key.namespace == namespace:
        return True
    here = str(key)
    return any(
        one.task.key.namespace == namespace and one.status.pipeline == here for one in present.lists.everyone
    )


def asked(query: MultiMapping[str], *names: str) -> Mapping[str, str]:
    """A request's parameters. Each may stand once: of two, a proxy that confines a team to its namespace and this page
    could read another one. Raises RequestError, also for parameters that are not among ``names``, and for what is too long.
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


def _choice(query: Mapping[str, str]) -> Choice:
    state, search = query.get("state"), query.get("search", "")
    if state is not None and not _STATE.fullmatch(state):
        raise _bad("state must be a word such as Training; leave it out to see all")
    if len(search) > LONGEST_SEARCH:
        raise _bad(f"search must have at most {LONGEST_SEARCH} characters")
    return Choice(_namespace(query), state, words_of(search))


def _part(query: Mapping[str, str]) -> tuple[int, int]:
    """Offset and limit of a list."""
    return (
        _number(query, "offset", 0, 0, LARGEST_OFFSET),
        _number(query, "limit", 25, 1, answers.MOST_TASKS),
    )


def _uids(query: Mapping[str, str]) -> tuple[str, ...]:
    text = query.get("uids")
    if text is None:
        return ()
    uids = tuple(dict.fromkeys(text.split(",")))
    if len(uids) > answers.MOST_COMPARED or not all(_UID.fullmatch(uid) for uid in uids):
        raise _bad(f"uids must be at most {answers.MOST_COMPARED} uids of tasks, separated by commas")
    return uids


def _key(query: Mapping[str, str], name: str) -> Key:
    parts = query.get(name, "").split("/")
    if len(parts) != 2 or not _NAMESPACE.fullmatch(parts[0]) or not _NAME.fullmatch(parts[1]):
        raise _bad(f"{name} must be NAMESPACE/NAME")
    return Key(*parts)


def _number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) <= most):
        raise _bad(f"{name} must be a whole number from {least} to {most}")
    return int(text)


def _bad(message: str) -> RequestError:
    return RequestError(400, Trouble(error="badRequest", message=message))
