"""``python -m bench fuzz``: hostile objects before a real API server and the operator's real process.

A tenant writes tasks and pipelines into a namespace of their own, in which one to three fields hold what somebody means
harm with: paths, templates, forged log lines, endless patterns, numbers at their ends, deep nesting. All that the operator
asks of the API server goes through a proxy that notes it. Beside them an honest tenant applies tasks; a third namespace,
in which nothing else happens, has a Secret and a ConfigMap.

Half of the objects meet the definitions (CRDs) as they are, which refuse most of them. The other half meet definitions
without any bound, as if they had been stored long ago: the operator has to defend itself.

``escaped``         requests that no object of the hostile namespace may cause
``passes_stopped``  honest tasks without a first status within a minute, passes that failed, ends of the process, and a
                    health that was red in the end
``forged``          lines of the operator's log that no record of its own has made
``unanswered``      objects of which the API server said nothing within half a minute: what one of them costs it is ours to
                    bound, in the definitions; they are no part of ``stored`` nor of ``refused``
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

from bench.fuzz_parts.fields import Field, fields, spoilt, without_bounds
from bench.fuzz_parts.judge import Ground, escaped, forged
from bench.fuzz_parts.texts import Hostile
from bench.operator_parts.crowd import SECRET, Crowd
from bench.operator_parts.process import Operator
from bench.operator_parts.scene import ROOT, coordinators, own_namespace
from bench.operator_parts.server import JSON, Access, Server, access, install_resources, refuse_company
from bench.options import parser
from bench.report import last_line, table
from mlora_operator.api import API_VERSION, pipeline, task
from mlora_operator.api.crd import pipeline_crd, task_crd
from tests.cluster import lifecycle
from tests.cluster.layout import this_state
from tests.fixtures.api_proxy import ApiProxy

MODEL = "Bench/Honest"
CAPACITY = 2**40  # bytes of a stage: whoever is taken fits
HONEST_EVERY = 100  # hostile objects for each honest task
TOLD_WITHIN = 60.0  # seconds
AT_ONCE = 16  # requests under way
PIPELINES = 0.25  # part of the objects that are pipelines
_REFERENCES = frozenset(
    {"name", "key", "uri", "uris", "endpoint", "hubEndpoint", "revision", "targetModules"}
)
SHOWN = 10  # findings that are printed


@dataclass
class Sent:
    """What became of the hostile objects."""

    stored: int = 0
    refused: Counter[int] = field(default_factory=Counter)  # by HTTP status
    unanswered: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.stored + self.refused.total() + len(self.unanswered)


def note(sent: Sent, status: int | None, made: JSON) -> None:
    """``status``: what the API server said of ``made``; None: nothing."""
    if status is None:
        size = len(json.dumps(made))
        sent.unanswered.append(f"{made['kind']} {made['metadata']['name']}, {size:,} bytes")
    elif status < 400:
        sent.stored += 1
    else:
        sent.refused[status] += 1


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    lifecycle.up(this_state(), lambda line: print(line, file=sys.stderr))
    count = options.objects or (200 if options.quick else 10_000 if options.long else 1_000)
    figures = asyncio.run(measure(count, options.seed, access(this_state().kubeconfig)))
    for name in ("escaped", "passes_stopped", "forged", "unanswered"):
        print(table((name, ""), [(str(one)[:200], "") for one in figures[f"{name}_first"]]) + "\n")
    print(table(("objects", ""), [("sent", figures["objects"]), ("stored", figures["stored"])]))
    shown = {key: value for key, value in figures.items() if not key.endswith("_first")}
    print(last_line("fuzz", shown, repetitions=1, threads=1, quick=options.quick))
    return 0


def _options(arguments: list[str]) -> Namespace:
    made = parser("fuzz", __doc__)
    made.add_argument(
        "--objects", type=int, help="how many are sent (default: 1000; 200 with --quick, 10000 with --long)"
    )
    made.add_argument("--seed", type=int, default=1, help="of what they hold (default: 1)")
    return made.parse_args(arguments)


async def measure(count: int, seed: int, where: Access) -> dict[str, Any]:
    """The figures, and the first findings of each kind as ``..._first``."""
    with tempfile.TemporaryDirectory() as folder, ApiProxy(where.url, where.authority) as proxy:
        async with Server(where) as server:
            await refuse_company(server)
            files = sorted((ROOT / "crds").glob("*.yaml"))
            await install_resources(server, files)
            async with (
                own_namespace(server, "fuzz-own") as own,
                own_namespace(server, "fuzz-hostile") as hostile,
                own_namespace(server, "fuzz-victim") as victim,
            ):
                story = _Story(server, proxy, Ground(hostile, own, _named()), victim, Random(seed))
                try:
                    return await story.run(count, where.through(proxy.url), Path(folder))
                finally:
                    await install_resources(server, files)


def _named() -> frozenset[str]:
    """What the operator reads by name in its own namespace."""
    return frozenset({SECRET, "mlora-honest-token", "mlora-honest-tls", "mlora-operator"})


class _Story:
    def __init__(self, server: Server, proxy: ApiProxy, ground: Ground, victim: str, random: Random) -> None:
        self._server, self._proxy, self._ground, self._victim = server, proxy, ground, victim
        self._random = random
        self._hostile = Hostile(victim, random)
        self._sent = Sent()
        self._crowd = Crowd(server, ground.own, (MODEL,))

    async def run(self, count: int, kubeconfig: JSON, folder: Path) -> dict[str, Any]:
        await self._prepare()
        with coordinators(CAPACITY) as url:
            settings = {
                "namespace": self._ground.own,
                "worker": {"image": "worker:1"},
                "coordinatorTls": False,
                "coordinatorUrl": url,
            }
            watch = asyncio.create_task(self._crowd.watch())
            with contextlib.ExitStack() as stack:
                stack.callback(watch.cancel)
                operator = stack.enter_context(Operator(folder / "operator", kubeconfig, settings))
                await self._send(count // 2)
                await self._loosen(folder)
                await self._send(count - count // 2)
                stopped = await self._stopped(operator)
                if watch.done():
                    watch.result()  # why it saw nothing more
                log = operator.log
        return self._figures(stopped, forged(log))

    async def _stopped(self, operator: Operator) -> list[str]:
        await self._crowd.until(lambda seen: seen.told is not None, TOLD_WITHIN)
        await asyncio.sleep(5)  # what the last objects cause
        late = {
            name: "never" if seen.told is None else f"{seen.told - seen.sent:.0f} s"
            for name, seen in self._crowd.tasks.items()
            if seen.told is None or seen.told - seen.sent > TOLD_WITHIN
        }
        stopped = [f"honest task {name} had its first status after: {wait}" for name, wait in late.items()]
        stopped += [line for line in operator.log.splitlines() if "a pass failed" in line]
        if not operator.is_running():
            stopped.append("the operator ended")
        elif not await asyncio.to_thread(operator.is_healthy):
            stopped.append("the operator is not healthy")
        return stopped

    def _figures(self, stopped: Sequence[str], lines: Sequence[str]) -> dict[str, Any]:
        left = escaped(self._proxy.requests, self._ground)
        waits = sorted(seen.told - seen.sent for seen in self._crowd.tasks.values() if seen.told is not None)
        return {
            "objects": self._sent.count,
            "stored": self._sent.stored,
            "refused": dict(self._sent.refused),
            "requests": len(self._proxy.requests),
            "honest": len(self._crowd.tasks),
            "honest_told_most_s": waits[-1] if waits else 0.0,
            "escaped": len(left),
            "passes_stopped": len(stopped),
            "forged": len(lines),
            "unanswered": len(self._sent.unanswered),
            "escaped_first": left[:SHOWN],
            "passes_stopped_first": stopped[:SHOWN],
            "forged_first": lines[:SHOWN],
            "unanswered_first": self._sent.unanswered[:SHOWN],
        }

    # --- the scene ---

    async def _prepare(self) -> None:
        own, victim = self._ground.own, self._victim
        keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
        hostile = self._ground.hostile
        for namespace, name in ((own, SECRET), (victim, "keys"), (hostile, "keys")):
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": keys}
            await self._server.create(f"/api/v1/namespaces/{namespace}/secrets", secret)
        rows = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rows"}, "data": {"a": "{}"}}
        for namespace in (victim, hostile):
            await self._server.create(f"/api/v1/namespaces/{namespace}/configmaps", rows)
        honest = {
            "model": {"name": MODEL, "uri": "s3://models/honest"},
            "stages": 2,  # as the coordinators of the benchmark report
            "allowedNamespaces": {"from": "All"},
            "startTimeout": "24h",
            "worker": {"nodeSelector": {"nowhere": "yes"}},
        }
        await self._server.create(self._path(own, pipeline.PLURAL), _object(pipeline.KIND, "honest", honest))

    async def _loosen(self, folder: Path) -> None:
        """From here on the API server lets everything of the right type through."""
        files = []
        for crd in (task_crd(), pipeline_crd()):
            path = folder / f"{crd['metadata']['name']}.yaml"
            path.write_text(yaml.safe_dump(without_bounds(crd)))
            files.append(path)
        await install_resources(self._server, files)
        await asyncio.sleep(2)  # the API server takes a new schema up a moment later

    # --- what is sent ---

    async def _send(self, count: int) -> None:
        slots = asyncio.Semaphore(AT_ONCE)
        leaves = {one["spec"]["names"]["kind"]: _leaves(one) for one in (task_crd(), pipeline_crd())}
        begun = self._sent.count
        async with asyncio.TaskGroup() as group:
            for number in range(begun, begun + count):
                if number % HONEST_EVERY == 0:
                    group.create_task(self._crowd.apply(1, 1000.0, f"honest-{number}"))
                kind = pipeline.KIND if self._random.random() < PIPELINES else task.KIND
                await slots.acquire()
                made = self._object(kind, number, leaves[kind])
                group.create_task(self._create(kind, made)).add_done_callback(lambda _: slots.release())

    def _object(self, kind: str, number: int, leaves: list[Field]) -> JSON:
        base = _pipeline(number) if kind == pipeline.KIND else _task(number, self._random)
        spec = spoilt(base, leaves, self._hostile, self._random)
        made = _object(kind, f"hostile-{number}", spec)
        if self._random.random() < 0.1:
            made["metadata"]["annotations"] = {"mlora.dev/retry": self._hostile.text()[:5000]}
        return made

    async def _create(self, kind: str, made: JSON) -> None:
        plural = pipeline.PLURAL if kind == pipeline.KIND else task.PLURAL
        note(self._sent, await self._server.try_create(self._path(self._ground.hostile, plural), made), made)

    def _path(self, namespace: str, plural: str) -> str:
        return f"/apis/{API_VERSION}/namespaces/{namespace}/{plural}"


def _object(kind: str, name: str, spec: JSON) -> JSON:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _leaves(crd: JSON) -> list[Field]:
    """All fields of a spec; those that name something elsewhere more often."""
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    found = list(fields(schema))
    return found + 4 * [one for one in found if _REFERENCES & {*one.path}]


_MODEL = {"baseModel": MODEL}
_TASKS: tuple[JSON, ...] = (
    {**_MODEL, "dataset": {"uri": "s3://rows/a.jsonl"}},
    {**_MODEL, "dataset": {"inline": '{"prompt": "a", "completion": "b"}'}},
    {**_MODEL, "dataset": {"uris": ["hf://datasets/a/b/c.jsonl", "https://example.org/a.jsonl"]}},
    {**_MODEL, "dataset": {"configMapRef": {"name": "rows", "key": "a"}}},
    {
        **_MODEL,
        "dataset": {"inline": "{}", "chatTemplateRef": {"name": "rows", "key": "a"}},
        "storage": {"endpoint": "http://s3.storage:8333", "secretRef": {"name": "keys"}},
    },
)


def _task(number: int, random: Random) -> JSON:
    """With an output of its own, so that it gets as far as it can."""
    return {**random.choice(_TASKS), "output": {"uri": f"s3://adapters/hostile/{number}"}}


def _pipeline(number: int) -> JSON:
    """Each for a model of its own, so that few tasks choose it; workers find no node."""
    return {
        "model": {"name": f"Bench/Hostile-{number}", "uri": "s3://models/x"},
        "worker": {"nodeSelector": {"nowhere": "yes"}},
        "startTimeout": "24h",
    }
