"""A long poll of each coordinator, and what is known through it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from urllib.parse import urlsplit

import aiohttp

from mlora_operator.coordinator.client import CoordinatorClient
from mlora_operator.coordinator.errors import (
    CoordinatorError,
    Invalid,
    NotUnderstood,
    Starting,
    Unreachable,
)
from mlora_operator.coordinator.progress import by_another_clock, heard
from mlora_operator.coordinator.reading import open_session
from mlora_operator.coordinator.shapes import Shapes, Unsteady
from mlora_operator.reconcile.cluster.config_map_texts import no_text
from mlora_operator.reconcile.ports import Endpoint, ReadText, WriteRefused
from mlora_operator.reconcile.state.log_fields import about_key
from mlora_operator.reconcile.state.plan_refusal import refused, taken
from mlora_operator.reconcile.state.snapshot import Contact, Key, encoded
from mlora_worker.protocol import Plan, Report

logger = logging.getLogger(__name__)

# Seconds from a report to the next question, and more for each task in it: a report of a thousand tasks costs both sides
# tens of milliseconds, and something in it changes all the time.
REPORTS_APART, APART_FOR_EACH = 0.1, 0.001
# To read a report takes a while where it is large. Between two the processor is for so many times as long for others.
CALM, CALM_MOST = 8.0, 10.0
WORDS = 500  # characters of an error
RETRY_AFTER = 1.0  # seconds between polls while the coordinator does not answer


class _Link:
    """A client with its poll and what is known through it, by a ``contact`` of before, too."""

    def __init__(
        self, key: Key, endpoint: Endpoint, client: CoordinatorClient, links: Links, contact: Contact | None
    ) -> None:
        self.endpoint = endpoint
        self.client = client
        self._shapes = Shapes()
        self.contact = contact or Contact(lost_since=links.now(), error="it has not answered yet")
        self._links = links
        self.task = asyncio.get_running_loop().create_task(self._poll(key), name=f"report poll of {key}")

    async def _poll(self, key: Key) -> None:
        after: int | None = None
        while True:
            try:
                report = await self.client.poll_report(after)
                self._shapes.check(report, self._links.now())
                before = self.contact
                self.contact = heard(before, report, self._links.now())
            except (CoordinatorError, Unsteady) as error:
                told = Invalid(f"report refused: {error}") if isinstance(error, Unsteady) else error
                await self._try_later(key, told)
                after = None  # it may come back as another one that counts from the beginning
                continue
            except Exception as error:  # whatever it answered, it is asked again
                logger.debug("of the coordinator of %s", key, exc_info=error, extra=about_key(key))
                await self._try_later(
                    key, Invalid(f"its answer cannot be read: {type(error).__name__}: {error}"[:WORDS])
                )
                after = None
                continue
            if before.lost_since is not None or report != before.report:
                self._links.wake()
            after = report.sequence
            calm = min(CALM * self.client.reading, CALM_MOST)
            await asyncio.sleep(max(REPORTS_APART + APART_FOR_EACH * len(report.tasks), calm))

    async def _try_later(self, key: Key, error: CoordinatorError) -> None:
        self._lost(key, error)
        await asyncio.sleep(max(RETRY_AFTER, min(CALM * self.client.reading, CALM_MOST)))

    def _lost(self, key: Key, error: CoordinatorError) -> None:
        before = self.contact
        since = before.lost_since or self._links.now()
        if isinstance(error, Starting):
            # A coordinator without its stages is a new one: nothing that the former said holds.
            self.contact = Contact(
                lost_since=since,
                error=str(error),
                starting=True,
                progressed=before.progressed,
                texts_before=before.texts if before.sent is not None else before.texts_before,
            )
        else:
            self.contact = replace(before, lost_since=since, error=str(error), starting=False)
        if before.lost_since is None:
            logger.warning("lost the coordinator of %s: %s", key, error, extra=about_key(key))
        if before.lost_since is None or before.starting != self.contact.starting:
            self._links.wake()


def _is_same_place(one: Endpoint, other: Endpoint) -> bool:
    """Whether it begins to encrypt or ends doing so does not matter."""
    return urlsplit(one.url)[1:] == urlsplit(other.url)[1:]


async def _with_texts(plan: Plan, report: Report, read: ReadText) -> Plan:
    """For a worker of a former version, which knows of no digests: texts themselves, for tasks that it has not heard of.
    It keeps those of the others."""
    there = {task.uid for task in report.tasks}
    tasks = []
    for task in plan.tasks:
        texts = {digest: await read(digest) for digest in task.digests if task.uid not in there}
        bare = {"dataset_digest": None, "template_digest": None}
        tasks.append(task.with_texts(texts).model_copy(update=bare) if task.digests else task)
    return plan.model_copy(update={"tasks": tuple(tasks)})


class Links:
    """The links to all coordinators (``ports.Coordinators`` over HTTP). Use as an async context manager.

    ``permit`` is called just before each plan and raises when none may be sent.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        now: Callable[[], datetime],
        permit: Callable[[], None] = lambda: None,
    ) -> None:
        self.wake = wake
        self.now = now
        self._permit = permit
        self._links: dict[Key, _Link] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Links:
        self._session = open_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [link.task for link in self._links.values()]
        self._links.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def follow(self, endpoints: Mapping[Key, Endpoint]) -> None:
        """Keep a link to each of these and to no other; one whose address, token or certificate changed is made anew. At
        the same address it is the same coordinator: what is known of it stays."""
        assert self._session is not None, "use as a context manager"
        former: dict[Key, _Link] = {}
        for key in [key for key, link in self._links.items() if endpoints.get(key) != link.endpoint]:
            former[key] = self._links.pop(key)
            former[key].task.cancel()
        for key, endpoint in endpoints.items():
            if key not in self._links:
                before = former.get(key)
                same = before if before is not None and _is_same_place(before.endpoint, endpoint) else None
                client = CoordinatorClient(self._session, endpoint, same.client if same else None)
                self._links[key] = _Link(key, endpoint, client, self, same.contact if same else None)

    async def send_text(self, pipeline: Key, digest: str, text: str) -> None:
        """Raises CoordinatorError."""
        link = self._link(pipeline)
        self._permit()
        await link.client.put_text(digest, encoded(text))

    def _link(self, pipeline: Key) -> _Link:
        link = self._links.get(pipeline)
        if link is None:
            raise Unreachable(f"there is no link to the coordinator of {pipeline}")
        return link

    def contacts(self) -> Mapping[Key, Contact]:
        return {key: link.contact for key, link in self._links.items()}

    def clock_jumped(self) -> None:
        """What was measured by the clock before says nothing now."""
        for link in self._links.values():
            link.contact = by_another_clock(link.contact, self.now())

    def endpoints(self) -> Mapping[Key, Endpoint]:
        """Of the coordinators that are followed."""
        return {key: link.endpoint for key, link in self._links.items()}

    async def send_plan(self, pipeline: Key, plan: Plan, read: ReadText = no_text) -> None:
        """Raises CoordinatorError, WriteRefused for a plan that is not understood there, and what ``read`` raises; the
        contact remembers a plan that was taken, and why another one was not."""
        link = self._link(pipeline)
        report = link.contact.report
        run = report.run_id if report is not None else None
        told = plan if report is None or report.lacks is not None else await _with_texts(plan, report, read)
        self._permit()
        try:
            await link.client.put_plan(told)
        except NotUnderstood as error:
            words = refused(link.contact.refused, plan, run, str(error))
            link.contact = replace(link.contact, refused=words)
            raise WriteRefused(str(error)) from error
        link.contact = replace(
            link.contact,
            sent=plan,
            refused=taken(link.contact.refused, run),
            sent_run=run,
            sent_sequence=link.contact.report.sequence if link.contact.report is not None else -1,
        )
