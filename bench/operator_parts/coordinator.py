"""A process that speaks for the workers of all pipelines, by the real protocol, and trains nothing.

``python -m bench.operator_parts.coordinator CAPACITY``: bytes of each stage. It prints its port. Each pipeline has the path
``/NAMESPACE/NAME``. A task takes a beat to be prepared, ``TRAINING`` beats of ``STEPS`` steps and a beat to be saved.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field

from aiohttp import web

from bench.forks import die_with_parent
from mlora_worker.protocol import AdapterInfo, DataCounts, Plan, Report, TaskPhase, TaskReport
from tests.fixtures.toy_facts import toy_facts, toy_stages

BEAT = 0.25  # seconds
TRAINING, STEPS = 4, 5
SETTLE = 0.2  # seconds in which further changes ride along with a report, as a worker has it
LARGEST_PLAN = 256 * 2**20
FACTS = toy_facts()
ENDED = (TaskPhase.SUCCEEDED, TaskPhase.FAILED)
DATA = DataCounts(rows=1000, used=1000, tokens=200_000, supervised_tokens=100_000)


@dataclass
class Pipeline:
    """What the coordinator of one would know."""

    generation: int = 0
    sequence: int = 0
    admitted: set[str] = field(default_factory=set)
    tasks: dict[str, TaskReport] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, plan: Plan) -> bool:
        if plan.generation < self.generation:
            return False
        self.generation = plan.generation
        self.admitted = {task.uid for task in plan.tasks if task.admitted}
        self.tasks = {
            task.uid: self.tasks.get(task.uid) or TaskReport(uid=task.uid, phase=TaskPhase.PREPARING)
            for task in plan.tasks
        }
        self._note()
        return True

    def beat(self) -> None:
        moved = {uid: self._moved(task) for uid, task in self.tasks.items()}
        if any(moved[uid] is not task for uid, task in self.tasks.items()):
            self.tasks = moved
            self._note()

    def _note(self) -> None:
        self.sequence += 1
        self.changed.set()

    def _moved(self, task: TaskReport) -> TaskReport:
        match task.phase:
            case TaskPhase.PREPARING:
                return task.model_copy(
                    update={"phase": TaskPhase.PREPARED, "data": DATA, "total_steps": TRAINING * STEPS}
                )
            case TaskPhase.PREPARED if task.uid in self.admitted:
                return task.model_copy(update={"phase": TaskPhase.TRAINING})
            case TaskPhase.TRAINING if task.step < task.total_steps:
                step = task.step + STEPS
                return task.model_copy(
                    update={"step": step, "loss": 2.0 / step, "tokens_per_second": 1000.0 + step}
                )
            case TaskPhase.TRAINING:
                return task.model_copy(update={"phase": TaskPhase.SAVING})
            case TaskPhase.SAVING:
                adapter = AdapterInfo(uri=f"s3://adapters/{task.uid}", sha256="ab" * 32, bytes=123_456)
                return task.model_copy(update={"phase": TaskPhase.SUCCEEDED, "adapter": adapter})
            case _:
                return task


class Coordinators:
    """One HTTP server for all of them."""

    def __init__(self, capacity: int) -> None:
        self._stages = toy_stages(capacity_bytes=capacity)
        self._pipelines: dict[str, Pipeline] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST_PLAN)
        app.add_routes(
            [
                web.put("/{namespace}/{name}/v1/plan", self._put),
                web.get("/{namespace}/{name}/v1/report", self._get),
            ]
        )
        return app

    async def live(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            for pipeline in self._pipelines.values():
                pipeline.beat()

    def _of(self, request: web.Request) -> Pipeline:
        return self._pipelines.setdefault(request.match_info["name"], Pipeline())

    async def _put(self, request: web.Request) -> web.Response:
        if not self._of(request).take(Plan.model_validate_json(await request.read())):
            raise web.HTTPConflict
        return web.Response(status=204)

    async def _get(self, request: web.Request) -> web.Response:
        pipeline = self._of(request)
        if "after" in request.query:
            await self._wait(pipeline, int(request.query["after"]), float(request.query["wait"]))
            await asyncio.sleep(SETTLE)
        report = Report(
            run_id="run-1",
            sequence=pipeline.sequence,
            plan_generation=pipeline.generation,
            ready=True,
            facts=FACTS,
            stages=self._stages,
            tasks=tuple(pipeline.tasks.values()),
        )
        return web.Response(text=report.to_json(), content_type="application/json")

    async def _wait(self, pipeline: Pipeline, after: int, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while pipeline.sequence <= after:
                    pipeline.changed.clear()
                    await pipeline.changed.wait()
        except TimeoutError:
            pass


async def serve(capacity: int) -> None:
    coordinators = Coordinators(capacity)
    runner = web.AppRunner(coordinators.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await coordinators.live()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve(int(sys.argv[1])))
