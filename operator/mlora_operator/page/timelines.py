"""What the stages of a pipeline did lately, asked of its coordinator: seldom, whoever looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import aiohttp

from mlora_operator.coordinator import CoordinatorClient
from mlora_operator.page.documents import TimelineDocument, TimelineSpan, TimelineTask
from mlora_operator.reconcile.ports import Endpoint
from mlora_operator.reconcile.state.snapshot import Key
from mlora_worker.stream.timeline import Timeline, bubbles, ended, latest, started

EVERY = 5.0  # seconds between two questions to one coordinator
MICROBATCHES = 32  # that are shown ...
MOST_SPANS = 1500  # ... or fewer, of a pipeline with many stages
AT_ONCE = 4  # questions under way
KEPT = 32  # pipelines whose last answer is kept


class Timelines:
    """Answers of the last seconds, one question at a time for each pipeline. Use within one event loop."""

    def __init__(
        self, session: aiohttp.ClientSession, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._monotonic = monotonic
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._asked: dict[tuple[Key, str], tuple[float, asyncio.Task[Timeline]]] = {}

    async def of(self, key: Key, endpoint: Endpoint, stages: int) -> Timeline:
        """The newest microbatches. Raises CoordinatorError, the same for all who ask within ``EVERY`` seconds."""
        place = (key, endpoint.url)
        known = self._asked.get(place)
        if known is None or (known[1].done() and self._monotonic() - known[0] >= EVERY):
            while len(self._asked) >= KEPT:
                self._asked.pop(next(iter(self._asked)))
            question = asyncio.create_task(self._ask(endpoint, stages), name=f"timeline of {key}")
            question.add_done_callback(_heard)
            self._asked.pop(place, None)
            known = self._asked[place] = self._monotonic(), question
        return await asyncio.shield(known[1])

    async def _ask(self, endpoint: Endpoint, stages: int) -> Timeline:
        count = max(2, min(MICROBATCHES, MOST_SPANS // (3 * stages)))
        async with self._slots:
            timeline = await CoordinatorClient(self._session, endpoint).get_timeline(count)
        return await asyncio.to_thread(latest, timeline, count)  # workers of a former version send all


def _heard(question: asyncio.Task[Timeline]) -> None:
    """An error that nobody waits for any more is no news."""
    if not question.cancelled():
        question.exception()


def timeline_document(
    pipeline: str,
    timeline: Timeline,
    names: Mapping[str, str],
    colours: Mapping[str, int],
) -> TimelineDocument:
    """``names``: of the tasks that the reader may know, by uid. At most ``MOST_SPANS`` spans, the newest. Pure."""
    spans = sorted(timeline.spans, key=lambda span: (span.start, span.stage))[-MOST_SPANS:]
    begin, end = started(spans), ended(spans)
    uids = list(dict.fromkeys(uid for span in spans for uid in span.tasks))
    position = {uid: index for index, uid in enumerate(uids)}
    shown = timeline.model_copy(update={"spans": tuple(spans)})
    return TimelineDocument(
        pipeline=pipeline,
        stages=timeline.stages,
        length=_micro(end - begin),
        busy=tuple(round(1 - share, 4) for share in bubbles(shown)) if spans else (0.0,) * timeline.stages,
        tasks=tuple(
            TimelineTask(name=names.get(uid), colour=colours.get(uid) if uid in names else None)
            for uid in uids
        ),
        spans=tuple(
            TimelineSpan(
                stage=span.stage,
                kind=span.kind,
                number=span.number,
                tasks=tuple(position[uid] for uid in span.tasks),
                tokens=span.tokens,
                start=_micro(span.start - begin),
                end=_micro(span.end - begin),
            )
            for span in spans
        ),
    )


def _micro(nanoseconds: int) -> int:
    return round(nanoseconds / 1000)
