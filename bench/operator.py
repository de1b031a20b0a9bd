"""``python -m bench operator``: the operator's process before a real API server, with thousands of tasks.

The API server is the test cluster's (``make cluster``), the operator a process started as its image starts it. Its requests
go through a proxy that counts them; users' requests, and the watch that takes the times, go straight to the server. Instead
of workers a process speaks the coordinators' protocol (bench/operator_parts/coordinator.py): it takes plans, and tasks go
through all phases within seconds, as many at once as the memory model lets in.

1. Tasks are applied at a steady rate. Counted: from the begin of a task's request until the watch shows its first status;
   and all that the operator writes (statuses, events, children; not its lease) until everything is at rest again.
2. All are finished, the pipelines have been scaled to zero: processor time of the operator.
3. It is ended as the kubelet ends it, a task is applied, it is started again. Counted: until it is healthy and its first
   pass has given that task a status.
4. Another pipeline with two real ranks and a tiny model. Counted: from the request of a task until the coordinator has its
   first step; its few rows are tokenised meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.operator_parts.crowd import SECRET, Crowd
from bench.operator_parts.process import Operator
from bench.operator_parts.scene import ROOT, coordinators, own_namespace
from bench.operator_parts.server import Access, Server, access, install_resources, refuse_company
from bench.operator_parts.warm import Warm, first_steps
from bench.options import parser, repetitions
from bench.report import last_line, table
from mlora_operator.api import API_VERSION
from mlora_operator.api import pipeline as lorapipeline
from tests.cluster import lifecycle
from tests.cluster.layout import this_state
from tests.fixtures.api_proxy import ApiProxy, Request

CAPACITY = 335 * 2**20  # bytes of a stage: some 20 tasks fit at once
IDLE_TIMEOUT = 5  # seconds
GOALS = {
    "apply_p99_s": 2.0,
    "writes": 6.0,
    "rss_mib": 300.0,
    "idle_cpu": 2.0,
    "restart_s": 10.0,
    "first_step_s": 2.0,
}


@dataclass(frozen=True, slots=True)
class Size:
    tasks: int
    pipelines: int
    rate: float  # tasks a second
    idle: float  # seconds that are watched when all is done
    warm: int  # tasks on real ranks


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    count = options.tasks or (60 if options.quick else 10_000 if options.long else 2_000)
    size = Size(
        count, options.pipelines, options.rate, 5.0 if options.quick else 30.0, 3 if options.quick else 7
    )
    lifecycle.up(this_state(), lambda line: print(line, file=sys.stderr))
    figures = asyncio.run(measure(size, access(this_state().kubeconfig), options.part))
    rows = [(key, figures[key], goal) for key, goal in GOALS.items() if key in figures]
    print(table(("", "here", "goal, at most"), rows))
    print(
        last_line("operator", figures, repetitions=repetitions(options, 1, 1), threads=1, quick=options.quick)
    )
    return 0


def _print_more(figures: Mapping[str, Any]) -> None:
    also = (
        "apply_median_s", "apply_most_s", "create_p99_s", "load_cpu", "drained_s", "status_writes_most",
        "rss_load_mib", "rss_idle_mib", "rss_restart_mib",
    )  # fmt: skip
    print(table(("also", ""), [(key, figures[key]) for key in also]))
    print(table(("writes of a task", ""), sorted(figures["writes_of"].items())))
    print(table(("states", "times"), figures["states"].items()))


def _options(arguments: list[str]) -> Namespace:
    made = parser("operator", __doc__)
    made.add_argument(
        "--tasks", type=int, help="how many are applied (default: 2000; 60 with --quick, 10000 with --long)"
    )
    made.add_argument("--part", choices=("many", "warm"), help="only steps 1 to 3, or only step 4")
    made.add_argument("--rate", type=float, default=50.0, help="of applying, a second (default: 50)")
    made.add_argument("--pipelines", type=int, default=4, help="that they are for, in turn (default: 4)")
    return made.parse_args(arguments)


async def measure(size: Size, where: Access, part: str | None) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ApiProxy(where.url, where.authority) as proxy:
        async with Server(where) as server:
            await refuse_company(server)
            await install_resources(server, sorted((ROOT / "crds").glob("*.yaml")))
            kubeconfig = where.through(proxy.url)
            if part != "warm":
                figures |= await _with_many(size, server, proxy, kubeconfig, Path(folder))
                _print_more(figures)  # the rest takes minutes
            if part != "many":
                async with own_namespace(server, "bench-operator") as namespace:
                    warm = Warm(server, namespace, kubeconfig, Path(folder) / "warm")
                    steps = await first_steps(warm, size.warm)
                figures |= {"first_step_s": _percentile(steps, 50), "first_step_most_s": max(steps)}
    return figures


async def _with_many(
    size: Size, server: Server, proxy: ApiProxy, kubeconfig: dict[str, Any], folder: Path
) -> dict[str, Any]:
    models = tuple(f"Bench/Model-{number}" for number in range(size.pipelines))
    async with own_namespace(server, "bench-operator") as namespace:
        with coordinators(CAPACITY) as url:
            settings = {
                "namespace": namespace,
                "watchNamespaces": [namespace],
                "worker": {"image": "worker:1"},
                "coordinatorTls": False,
                "coordinatorUrl": url,
            }
            await _prepare(server, namespace, models)
            crowd = Crowd(server, namespace, models)
            watch = asyncio.create_task(crowd.watch())
            try:
                with Operator(folder / "many", kubeconfig, settings) as operator:
                    return await _story(size, crowd, proxy, operator)
            finally:
                watch.cancel()


async def _story(size: Size, crowd: Crowd, proxy: ApiProxy, operator: Operator) -> dict[str, Any]:
    await crowd.apply(size.pipelines, 1.0, "first")  # every pipeline is up, and its coordinator has spoken
    if not await crowd.until(lambda seen: seen.ended is not None, 120):
        raise RuntimeError(f"the first tasks did not end\n{operator.last_words}")
    crowd.tasks.clear()
    crowd.changes.clear()

    before, cpu, begun = len(proxy.requests), operator.cpu_seconds, time.monotonic()
    await crowd.apply(size.tasks, size.rate, "task")
    if not await crowd.until(lambda seen: seen.ended is not None, 60 + size.tasks * 0.3):
        ended = sum(seen.ended is not None for seen in crowd.tasks.values())
        raise RuntimeError(f"{ended} of {size.tasks} tasks ended\n{operator.last_words}")
    drained = time.monotonic() - begun
    load_cpu = (operator.cpu_seconds - cpu) / drained * 100
    seen = list(crowd.tasks.values())
    waits = [(one.told or math.inf) - one.sent for one in seen]
    peak = operator.peak_mib
    status_writes = max(crowd.changes.values())
    states = dict(Counter(" ".join(one.states) for one in seen).most_common(8))

    await asyncio.sleep(IDLE_TIMEOUT + 10)  # the last events are told, and the workers are gone
    writes = [one for one in proxy.requests[before:] if one.is_write and not one.is_lease]
    cpu, begun = operator.cpu_seconds, time.monotonic()
    await asyncio.sleep(size.idle)
    idle = (operator.cpu_seconds - cpu) / (time.monotonic() - begun) * 100
    resident = operator.resident_mib

    restart = await _restart(crowd, operator)
    return {
        "tasks": size.tasks,
        "pipelines": size.pipelines,
        "rate": size.rate,
        "apply_p99_s": _percentile(waits, 99),
        "apply_median_s": _percentile(waits, 50),
        "apply_most_s": max(waits),
        "create_p99_s": _percentile([(one.made or math.inf) - one.sent for one in seen], 99),
        "writes": len(writes) / size.tasks,
        "writes_of": _kinds(writes, size.tasks),
        "status_writes_most": status_writes,
        "states": states,
        "load_cpu": load_cpu,
        "drained_s": drained,
        "rss_mib": max(peak, operator.peak_mib),
        "rss_load_mib": peak,
        "rss_idle_mib": resident,
        "rss_restart_mib": operator.peak_mib,
        "idle_cpu": idle,
        "restart_s": restart,
    }


async def _restart(crowd: Crowd, operator: Operator) -> float:
    """Seconds from the start of the process until it is healthy and a pass has looked at everything."""
    await asyncio.to_thread(operator.stop)
    crowd.tasks.clear()
    await crowd.apply(1, 1.0, "late")
    begun = time.monotonic()
    operator.start()
    await asyncio.to_thread(operator.wait_healthy)
    if not await crowd.until(lambda seen: seen.told is not None, 120):
        raise RuntimeError(f"no pass after the restart\n{operator.last_words}")
    told = max(seen.told or math.inf for seen in crowd.tasks.values())
    return max(time.monotonic(), told) - begun if told < begun else max(told, begun) - begun


def _kinds(writes: Sequence[Request], tasks: int) -> dict[str, float]:
    """Writes of a task by what they write."""
    kinds = Counter(_kind(one) for one in writes)
    return {kind: count / tasks for kind, count in kinds.items()}


def _kind(request: Request) -> str:
    parts = request.path.partition("?")[0].split("/")
    after = parts[parts.index("namespaces") + 2 :] if "namespaces" in parts else parts
    return f"{request.method} {after[0]}" + (f" {after[2]}" if len(after) > 2 else "")


async def _prepare(server: Server, namespace: str, models: Sequence[str]) -> None:
    """The Secret that tasks name, and a pipeline for each model. Its pods find no node: nobody is there but the API."""
    keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    await server.create(
        f"/api/v1/namespaces/{namespace}/secrets",
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": keys},
    )
    for number, model in enumerate(models):
        await server.create(
            f"/apis/{API_VERSION}/namespaces/{namespace}/{lorapipeline.PLURAL}",
            {
                "apiVersion": API_VERSION,
                "kind": lorapipeline.KIND,
                "metadata": {"name": f"pipeline-{number}"},
                "spec": {
                    "model": {"name": model, "uri": f"s3://models/{number}"},
                    "stages": 2,
                    "idleTimeout": f"{IDLE_TIMEOUT}s",
                    "startTimeout": "24h",
                    "worker": {"nodeSelector": {"nowhere": "yes"}},
                },
            },
        )


def _percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
