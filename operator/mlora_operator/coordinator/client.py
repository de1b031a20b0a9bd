"""One question to a coordinator, and its answer. What comes from there is read within bounds, and nothing follows where it
leads (``reading``)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeVar

import aiohttp

from mlora_operator.coordinator.errors import (
    Invalid,
    NotUnderstood,
    Starting,
    Unauthorized,
    Unreachable,
    Untrusted,
)
from mlora_operator.coordinator.reading import PLAIN, AnswerBound, Unbounded, beginning, read, understand
from mlora_operator.coordinator.trusting import context, distrust
from mlora_operator.reconcile.ports import CoordinatorTrust, Endpoint
from mlora_worker.protocol import REPORT_FORMAT, REPORT_HEADER, Plan, Report
from mlora_worker.stream.timeline import Timeline

POLL_WAIT = 10.0  # seconds that the coordinator may hold a poll; a dead peer is noticed a little later
ANSWER_WITHIN = 5.0  # seconds for everything else
TIMELINE_WITHIN = 30.0  # seconds: all ranks are asked, and it is megabytes
LARGEST_REPORT = AnswerBound(32 * 2**20)
LARGEST_TIMELINE = AnswerBound(32 * 2**20)  # with few microbatches
LARGEST_RECORD = AnswerBound(512 * 2**20, values=2**24, containers=2**22)  # all that the stages have recorded
NO_BODY = 4096  # bytes of an answer that says nothing but that it was understood
ANSWER_SHOWN = 500  # characters of an error's body


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
        self.reading = 0.0  # seconds that the last report took to become an object
        self._former_token: str | None = None
        self._former_trust: CoordinatorTrust | None = None
        if former is not None:
            self._former_token = _before(self._token, former._token, former._former_token)
            self._former_trust = _before(self._trust, former._trust, former._former_trust)

    async def put_plan(self, plan: Plan) -> None:
        """Hand over a plan. Returns when the coordinator has taken it. Raises CoordinatorError."""
        await self._call("PUT", "/v1/plan", {}, plan.to_json(), ANSWER_WITHIN, NO_BODY)

    async def put_text(self, digest: str, text: bytes) -> None:
        """Hand over a text that the coordinator lacks. Raises CoordinatorError."""
        await self._call("PUT", f"/v1/texts/{digest}", {}, text, ANSWER_WITHIN, NO_BODY)

    async def poll_report(self, after: int | None = None, wait: float = POLL_WAIT) -> Report:
        """The report, at once when ``after`` is None, else as soon as one with a higher sequence is there or
        after ``wait`` seconds. Raises CoordinatorError."""
        query = {} if after is None else {"after": str(after), "wait": f"{wait:g}"}
        within = ANSWER_WITHIN + (wait if query else 0)
        body = await self._call("GET", "/v1/report", query, None, within, LARGEST_REPORT.size)
        begun = time.monotonic()
        try:
            return understand(Report, body, LARGEST_REPORT)
        except ValueError as error:
            raise Invalid(f"the report is invalid: {error}") from None
        finally:
            self.reading = time.monotonic() - begun

    async def get_timeline(self, microbatches: int | None = None) -> Timeline:
        """The newest ``microbatches`` of what the stages did; without, all that they have recorded, which is for stages of
        one's own. Raises CoordinatorError."""
        query = {} if microbatches is None else {"microbatches": str(microbatches)}
        bound = LARGEST_TIMELINE if query else LARGEST_RECORD
        body = await self._call("GET", "/v1/timeline", query, None, TIMELINE_WITHIN, bound.size)
        try:
            return understand(Timeline, body, bound)
        except ValueError as error:
            raise Invalid(f"the timeline is invalid: {error}") from None

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: str | bytes | None,
        within: float,
        most: int,
    ) -> bytes:
        try:
            found = await self._authorized(self._trust, method, path, query, body, within, most)
        except Untrusted:
            if self._former_trust is None:
                raise
            return await self._authorized(self._former_trust, method, path, query, body, within, most)
        self._former_trust = None
        return found

    async def _authorized(
        self,
        trust: CoordinatorTrust | None,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: str | bytes | None,
        within: float,
        most: int,
    ) -> bytes:
        try:
            found = await self._ask(trust, self._token, method, path, query, body, within, most)
        except Unauthorized:
            if self._former_token is None:
                raise
            return await self._ask(trust, self._former_token, method, path, query, body, within, most)
        self._former_token = None
        return found

    async def _ask(
        self,
        trust: CoordinatorTrust | None,
        token: str,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: str | bytes | None,
        within: float,
        most: int,
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=within, sock_connect=ANSWER_WITHIN)
        headers = {"Authorization": f"Bearer {token}", REPORT_HEADER: str(REPORT_FORMAT), **PLAIN}
        if body is not None:
            plain = isinstance(body, bytes)
            headers["Content-Type"] = "text/plain; charset=utf-8" if plain else "application/json"
        encrypted = self._url.startswith("https:")
        try:
            async with self._session.request(
                method,
                self._url + path,
                params=query,
                data=body,
                headers=headers,
                timeout=timeout,
                ssl=context(trust, self._url) if encrypted else True,
                server_hostname=trust.host if encrypted and trust is not None else None,
                allow_redirects=False,  # what is sent is for this coordinator alone
            ) as answer:
                if answer.status == 200:
                    return await read(answer, most)
                text = await beginning(answer, ANSWER_SHOWN)
        except TimeoutError as error:
            raise Unreachable(f"no answer from {self._url} within {within:g} s") from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise Untrusted(distrust(self._url, trust, error.certificate_error)) from error
        except Unbounded as error:
            raise Invalid(f"the answer of {self._url} was rejected: {error}") from None
        except aiohttp.ClientError as error:
            raise Unreachable(f"{self._url}: {str(error)[:ANSWER_SHOWN]}") from error
        if answer.status == 204:
            return b""
        if answer.status in (401, 403):
            raise Unauthorized(f"{self._url} rejected the operator's token")
        if answer.status == 503:
            raise Starting(text)
        if answer.status >= 500:
            raise Unreachable(f"{self._url} answered {answer.status}: {text}")
        if 300 <= answer.status < 400:
            raise Invalid(
                f"{self._url} answered {answer.status}, which is a redirect and is not followed: credentials are "
                f"sent to this coordinator only"
            )
        refused = NotUnderstood if answer.status == 422 else Invalid
        raise refused(f"{self._url} answered {answer.status}: {text}")


T = TypeVar("T")


def _before(now: T, last: T, last_but_one: T | None) -> T | None:
    """What was in force before ``now`` and may be so still at the other side."""
    return last if last != now else last_but_one
