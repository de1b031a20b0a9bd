"""HTTP(S) to the coordinators: one client per pipeline, and one long poll that keeps its last report.

Errors of the client, all ``CoordinatorError``:

- ``Unreachable``: no connection, no answer in time, or a 5xx; comes and goes with pods.
- ``Starting``: the coordinator is there but its stages still load the model (503).
- ``Unauthorized``: the token is not the coordinator's.
- ``Untrusted``: the certificate is not the coordinator's. Whoever answered there was sent nothing.
- ``Invalid``: one side does not understand the other; the message has the answer.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError

from mlora_operator.reconcile.about import about_key
from mlora_operator.reconcile.ports import Endpoint, Trust
from mlora_operator.reconcile.progress import by_another_clock, heard
from mlora_operator.reconcile.snapshot import Contact, Key
from mlora_worker.protocol import REPORT_FORMAT, REPORT_HEADER, Plan, Report
from mlora_worker.stream.timeline import Timeline

logger = logging.getLogger(__name__)

POLL_WAIT = 10.0  # seconds that the coordinator may hold a poll; a dead peer is noticed a little later
ANSWER_WITHIN = 5.0  # seconds for everything else
TIMELINE_WITHIN = 30.0  # seconds: all ranks are asked, and it is megabytes
# Seconds from a report to the next question, and more for each task in it: a report of a thousand tasks costs both sides
# tens of milliseconds, and something in it changes all the time.
REPORTS_APART, APART_FOR_EACH = 0.1, 0.001
RETRY_AFTER = 1.0  # seconds between polls while the coordinator does not answer
ANSWER_SHOWN = 500  # characters of an error's body
_WAY_OUT = "another one is made when the Secret is deleted"


class CoordinatorError(Exception):
    pass


class Unreachable(CoordinatorError):
    pass


class Starting(CoordinatorError):
    pass


class Unauthorized(CoordinatorError):
    pass


class Untrusted(CoordinatorError):
    pass


class Invalid(CoordinatorError):
    pass


class CoordinatorClient:
    """One coordinator; the session belongs to the caller.

    ``former``: the client before this one, of the same coordinator with another token or certificate. What was made anew
    reaches the coordinator's disk a minute or more after the API server; until the new is taken, the former holds.
    """

    def __init__(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, former: CoordinatorClient | None = None
    ) -> None:
        self._session = session
        self._url = endpoint.url.rstrip("/")
        self._token, self._trust = endpoint.token, endpoint.trust
        self._former_token: str | None = None
        self._former_trust: Trust | None = None
        if former is not None:
            self._former_token = _before(self._token, former._token, former._former_token)
            self._former_trust = _before(self._trust, former._trust, former._former_trust)

    async def put_plan(self, plan: Plan) -> None:
        """Hand over a plan. Returns when the coordinator has taken it. Raises CoordinatorError."""
        await self._call("PUT", "/v1/plan", {}, plan.to_json(), ANSWER_WITHIN)

    async def poll_report(self, after: int | None = None, wait: float = POLL_WAIT) -> Report:
        """The report, at once when ``after`` is None, else as soon as one with a higher sequence is there or
        after ``wait`` seconds. Raises CoordinatorError."""
        query = {} if after is None else {"after": str(after), "wait": f"{wait:g}"}
        text = await self._call("GET", "/v1/report", query, None, ANSWER_WITHIN + (wait if query else 0))
        try:
            return Report.model_validate_json(text, extra="ignore")  # workers may be newer
        except ValidationError as error:
            raise Invalid(
                f"report not understood: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
            ) from error

    async def get_timeline(self, microbatches: int | None = None) -> Timeline:
        """What the stages did lately, or with the newest ``microbatches``. Raises CoordinatorError."""
        query = {} if microbatches is None else {"microbatches": str(microbatches)}
        text = await self._call("GET", "/v1/timeline", query, None, TIMELINE_WITHIN)
        try:
            return Timeline.model_validate_json(text, extra="ignore")
        except ValidationError as error:
            raise Invalid(f"timeline not understood: {error.errors()[0]['msg']}") from error

    async def _call(
        self, method: str, path: str, query: Mapping[str, str], body: str | None, within: float
    ) -> str:
        try:
            text = await self._authorized(self._trust, method, path, query, body, within)
        except Untrusted:
            if self._former_trust is None:
                raise
            return await self._authorized(self._former_trust, method, path, query, body, within)
        self._former_trust = None
        return text

    async def _authorized(
        self,
        trust: Trust | None,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: str | None,
        within: float,
    ) -> str:
        try:
            text = await self._ask(trust, self._token, method, path, query, body, within)
        except Unauthorized:
            if self._former_token is None:
                raise
            return await self._ask(trust, self._former_token, method, path, query, body, within)
        self._former_token = None
        return text

    async def _ask(
        self,
        trust: Trust | None,
        token: str,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: str | None,
        within: float,
    ) -> str:
        timeout = aiohttp.ClientTimeout(total=within, sock_connect=ANSWER_WITHIN)
        headers = {"Authorization": f"Bearer {token}", REPORT_HEADER: str(REPORT_FORMAT)}
        if body is not None:
            headers["Content-Type"] = "application/json"
        encrypted = self._url.startswith("https:")
        try:
            async with self._session.request(
                method,
                self._url + path,
                params=query,
                data=body,
                headers=headers,
                timeout=timeout,
                ssl=_context(trust, self._url) if encrypted else True,
                server_hostname=trust.host if encrypted and trust is not None else None,
            ) as answer:
                text = await answer.text()
        except TimeoutError as error:
            raise Unreachable(f"no answer from {self._url} within {within:g} s") from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise Untrusted(_distrust(self._url, trust, error.certificate_error)) from error
        except aiohttp.ClientError as error:
            raise Unreachable(f"{self._url}: {error}") from error
        if answer.status in (401, 403):
            raise Unauthorized(f"{self._url} refuses the operator's token")
        if answer.status == 503:
            raise Starting(text[:ANSWER_SHOWN])
        if answer.status >= 500:
            raise Unreachable(f"{self._url} answered {answer.status}: {text[:ANSWER_SHOWN]}")
        if answer.status >= 400:
            raise Invalid(f"{self._url} answered {answer.status}: {text[:ANSWER_SHOWN]}")
        return text


T = TypeVar("T")


def _before(now: T, last: T, last_but_one: T | None) -> T | None:
    """What was in force before ``now`` and may be so still at the other side."""
    return last if last != now else last_but_one


@lru_cache(maxsize=1024)  # milliseconds each time
def _context(trust: Trust | None, url: str) -> ssl.SSLContext:
    """For TLS with whoever has this very certificate; no authority counts. Raises Untrusted."""
    if trust is None:
        raise Untrusted(f"by which certificate {url} proves itself is not known")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # asks for a certificate, and for its name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be signed by itself
    first, end, _ = trust.certificate.partition("-----END CERTIFICATE-----")  # not who signed it
    try:
        context.load_verify_locations(cadata=first + end)
    except (ssl.SSLError, ValueError, TypeError):  # TypeError: not ASCII
        raise Untrusted(f"{trust.origin} has no certificate in tls.crt; {_WAY_OUT}") from None
    return context


def _distrust(url: str, trust: Trust | None, error: Exception) -> str:
    words = getattr(error, "verify_message", "") or str(error)
    origin = trust.origin if trust is not None else "nothing"
    return f"{url} does not prove itself by the certificate in {origin} ({words}), so it is sent nothing; {_WAY_OUT}"


class _Link:
    """A client with its poll and what is known through it, by a ``contact`` of before, too."""

    def __init__(
        self, key: Key, endpoint: Endpoint, client: CoordinatorClient, links: Links, contact: Contact | None
    ) -> None:
        self.endpoint = endpoint
        self.client = client
        self.contact = contact or Contact(lost_since=links.now(), error="it has not answered yet")
        self._links = links
        self.task = asyncio.get_running_loop().create_task(self._poll(key), name=f"report poll of {key}")

    async def _poll(self, key: Key) -> None:
        after: int | None = None
        while True:
            try:
                report = await self.client.poll_report(after)
            except CoordinatorError as error:
                self._lost(key, error)
                after = None  # it may come back as another one that counts from the beginning
                await asyncio.sleep(RETRY_AFTER)
                continue
            before = self.contact
            self.contact = heard(before, report, self._links.now())
            if before.lost_since is not None or report != before.report:
                self._links.wake()
            after = report.sequence
            await asyncio.sleep(REPORTS_APART + APART_FOR_EACH * len(report.tasks))

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
        # A pod that comes back has another address under the same name, so names are resolved each time; and
        # no connection to the former one is kept.
        connector = aiohttp.TCPConnector(use_dns_cache=False, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector)
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

    def contacts(self) -> Mapping[Key, Contact]:
        return {key: link.contact for key, link in self._links.items()}

    def clock_jumped(self) -> None:
        """What was measured by the clock before says nothing now."""
        for link in self._links.values():
            link.contact = by_another_clock(link.contact, self.now())

    def endpoints(self) -> Mapping[Key, Endpoint]:
        """Of the coordinators that are followed."""
        return {key: link.endpoint for key, link in self._links.items()}

    async def send_plan(self, pipeline: Key, plan: Plan) -> None:
        """Raises CoordinatorError; the contact remembers only a plan that was taken."""
        link = self._links.get(pipeline)
        if link is None:
            raise Unreachable(f"there is no link to the coordinator of {pipeline}")
        report = link.contact.report
        self._permit()
        await link.client.put_plan(plan)
        link.contact = replace(
            link.contact,
            sent=plan,
            sent_run=report.run_id if report is not None else None,
            sent_sequence=link.contact.report.sequence if link.contact.report is not None else -1,
        )
