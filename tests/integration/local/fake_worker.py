"""Stands for ``python -m mlora_worker``: a coordinator that speaks the protocol over HTTP and trains nothing.

Rank 0 serves; other ranks hold a connection to it and leave with 75 when it is gone, like real ones. A file
``script.json`` beside the token says what shall go wrong:

    {"die": {"rank": 0, "after_step": 3, "code": 1, "times": 1}, "fail": {"a": "InvalidRow"}, "step_seconds": 0.01,
     "stall": {"after_step": 3, "times": 1}}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import uuid
from pathlib import Path

from aiohttp import web

from mlora_worker.protocol import (
    AdapterInfo,
    Failure,
    FailureReason,
    ModelFacts,
    ModuleShape,
    Plan,
    Report,
    StageReport,
    TaskPhase,
    TaskPlan,
    TaskReport,
    WorkerConfig,
)
from mlora_worker.stream.timeline import Span, Timeline

CONFIG = WorkerConfig.model_validate_json(os.environ["MLORA_WORKER_CONFIG"])
RANK = int(os.environ["MLORA_RANK"])
TOKEN = Path(CONFIG.token_file).read_text()
HOME = Path(os.environ["FAKE_HOME"])
SCRIPT = json.loads((HOME / "script.json").read_text())


def note(name: str, content: str) -> None:
    with (HOME / name).open("a") as file:
        file.write(content + "\n")


def die_if_told(step: int) -> None:
    """Ends the process where the script says so, a limited number of times over all starts."""
    wish = SCRIPT.get("die")
    if wish is None or wish["rank"] != RANK or step < wish["after_step"]:
        return
    deaths = HOME / "deaths"
    if deaths.exists() and len(deaths.read_text().split()) >= wish["times"]:
        return
    note("deaths", str(RANK))
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(wish["code"])


async def stall_if_told(step: int) -> None:
    """Trains no further where the script says so, a limited number of times over all starts."""
    wish = SCRIPT.get("stall")
    stalls = HOME / "stalls"
    if wish is None or step < wish["after_step"]:
        return
    if stalls.exists() and len(stalls.read_text().split()) >= wish["times"]:
        return
    note("stalls", str(step))
    await asyncio.Event().wait()


class Coordinator:
    def __init__(self) -> None:
        self.run_id = uuid.uuid4().hex
        self.sequence = 0
        self.plan = Plan(generation=0)
        self.reports: dict[str, TaskReport] = {}
        self.training: dict[str, asyncio.Task[None]] = {}
        self.changed = asyncio.Condition()

    async def put_plan(self, request: web.Request) -> web.Response:
        plan = Plan.model_validate_json(await request.text())
        if plan.generation >= self.plan.generation:
            self.plan = plan
            wanted = {task.uid for task in plan.tasks}
            for uid in self.reports.keys() - wanted:
                del self.reports[uid]
                self.training.pop(uid).cancel()
            for task in plan.tasks:
                if task.uid not in self.training:
                    self.training[task.uid] = asyncio.create_task(self.train(task))
        await self.say()
        return web.Response(status=204)

    async def say(self, report: TaskReport | None = None) -> None:
        async with self.changed:
            if report is not None:
                self.reports[report.uid] = report
            self.sequence += 1
            self.changed.notify_all()

    async def train(self, task: TaskPlan) -> None:
        assert task.base_model == CONFIG.model.name
        fail = SCRIPT.get("fail", {}).get(task.name)
        await self.say(TaskReport(uid=task.uid, phase=TaskPhase.PREPARING))
        if fail is not None:
            failure = Failure(reason=FailureReason(fail), message=f"line 7 of {task.dataset.uri} is bad")
            await self.say(TaskReport(uid=task.uid, phase=TaskPhase.FAILED, failure=failure))
            return
        steps = task.training.max_steps or 3
        await self.say(TaskReport(uid=task.uid, phase=TaskPhase.PREPARED, total_steps=steps))
        async with self.changed:
            await self.changed.wait_for(lambda: self.admitted(task.uid))
        note("trained", f"{task.namespace}/{task.name}")
        if task.storage.access_key is not None:
            note("keys", task.storage.access_key.get_secret_value())
        note("endpoints", str(task.storage.endpoint))
        for step in range(1, steps + 1):
            await asyncio.sleep(SCRIPT.get("step_seconds", 0.01))
            die_if_told(step)
            await stall_if_told(step)
            await self.say(
                TaskReport(
                    uid=task.uid,
                    phase=TaskPhase.TRAINING,
                    step=step,
                    total_steps=steps,
                    loss=2.0 / step,
                    tokens_per_second=100.0,
                )
            )
        adapter = AdapterInfo(uri=task.output_uri, sha256="0" * 64, bytes=10)
        await self.say(
            TaskReport(
                uid=task.uid,
                phase=TaskPhase.SUCCEEDED,
                step=steps,
                total_steps=steps,
                loss=2.0 / steps,
                adapter=adapter,
            )
        )

    def admitted(self, uid: str) -> bool:
        return any(task.uid == uid and task.admitted for task in self.plan.tasks)

    async def get_report(self, request: web.Request) -> web.Response:
        if "after" in request.query:
            after, wait = int(request.query["after"]), float(request.query["wait"])
            async with self.changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait_for(lambda: self.sequence > after), wait)
        return web.Response(text=self.report().to_json(), content_type="application/json")

    async def get_timeline(self, _: web.Request) -> web.Response:
        span = Span(stage=0, kind="forward", number=1, tasks=("u",), tokens=3, start=10, end=20)
        timeline = Timeline(stages=CONFIG.stages, spans=(span,), names={"u": "default/a"}, clock="host")
        return web.Response(text=timeline.to_json(), content_type="application/json")

    def report(self) -> Report:
        module = ModuleShape(stage=0, name="q_proj", in_features=64, out_features=64, count=2)
        facts = ModelFacts(
            hidden_size=64,
            intermediate_size=128,
            layers=4,
            attention_heads=4,
            vocab_size=1000,
            max_positions=2048,
            dtype_bytes=4,
            modules=(module, module.model_copy(update={"name": "v_proj"})),
        )
        stages = tuple(
            StageReport(
                stage=stage,
                first_layer=stage,
                last_layer=stage,
                device="cpu",
                resident_bytes=1_000_000,
                capacity_bytes=1_000_000_000,
            )
            for stage in range(CONFIG.stages)
        )
        return Report(
            run_id=self.run_id,
            sequence=self.sequence,
            plan_generation=self.plan.generation,
            ready=True,
            facts=facts,
            stages=stages,
            tasks=tuple(self.reports.values()),
        )


@web.middleware
async def check_token(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
    if request.headers.get("Authorization") != f"Bearer {TOKEN}":
        return web.Response(status=401)
    return await handler(request)


async def first_rank() -> None:
    coordinator = Coordinator()
    app = web.Application(middlewares=[check_token])
    app.router.add_put("/v1/plan", coordinator.put_plan)
    app.router.add_get("/v1/report", coordinator.get_report)
    app.router.add_get("/v1/timeline", coordinator.get_timeline)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, CONFIG.coordinator_host, CONFIG.http_port).start()

    async def peer(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()  # ends when the peer is gone
        os._exit(75)

    await asyncio.start_server(peer, CONFIG.coordinator_host, CONFIG.link_port)
    await asyncio.Event().wait()


async def later_rank() -> None:
    while True:
        try:
            reader, _ = await asyncio.open_connection(CONFIG.coordinator_host, CONFIG.link_port)
            break
        except OSError:
            await asyncio.sleep(0.05)
    if SCRIPT.get("die", {}).get("rank") == RANK:
        await asyncio.sleep(0.5)
        die_if_told(10**9)
    await reader.read()
    os._exit(75)


if __name__ == "__main__":
    note("pids", str(os.getpid()))
    note("environment", json.dumps({"rank": RANK, "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}))
    asyncio.run(first_rank() if RANK == 0 else later_rank())
