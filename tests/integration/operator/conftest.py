"""The operator as a process of its own, against a real API server and a coordinator that speaks the real protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mlora_worker.protocol import (
    AdapterInfo,
    DataCounts,
    Plan,
    Report,
    TaskPhase,
    TaskReport,
)
from tests.fixtures.cluster import Cluster
from tests.fixtures.kubectl import Kubectl
from tests.fixtures.loratask import loratask
from tests.fixtures.toy_facts import toy_facts, toy_stages

ROOT = Path(__file__).parents[3]
MODEL, OTHER_MODEL, THIRD_MODEL = "Org/Toy-1B", "Org/Other-1B", "Org/Third-1B"


class FakeCoordinator:
    """Prepares at once, trains what is admitted step by step, succeeds after the last step.

    Runs in a thread of its own. ``hold`` keeps tasks from going beyond a phase; ``steps`` and ``uploads`` tell what was
    done, by the tasks' names. It speaks for every pipeline but those that another one speaks for (``beside``).
    """

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.tokens: set[str] = set()
        self.run_id = "run-1"
        self.hold: TaskPhase | None = None
        self.is_there = True
        self.steps: Counter[str] = Counter()
        self.uploads: list[str] = []
        self.url = ""
        self._beside: dict[str, FakeCoordinator] = {}
        self._total: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._generation = 0
        self._sequence = 0
        self._tasks: dict[str, TaskReport] = {}
        self._admitted: set[str] = set()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def restart(self) -> None:
        """As if the worker group had started anew."""
        with self._lock:
            number = int(self.run_id.rsplit("-", 1)[1]) + 1
            self.run_id, self._generation, self._sequence = f"run-{number}", 0, 0
            self._tasks, self._admitted = {}, set()

    def beside(self, pipeline: str) -> FakeCoordinator:
        """The coordinator of this pipeline, at the same address, with plans and tasks of its own."""
        return self._beside.setdefault(pipeline, FakeCoordinator())

    def reset(self) -> None:
        """For the next test."""
        self._beside.clear()
        with self._lock:
            self.steps, self.uploads, self.is_there = Counter(), [], True
            self.plans, self.tokens, self.hold = [], set(), None
            self.run_id, self._generation = "run-1", 0
            self._tasks, self._admitted = {}, set()

    @property
    def known(self) -> dict[str, TaskPhase]:
        with self._lock:
            return {uid: task.phase for uid, task in self._tasks.items()}

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.add_routes([web.put("/{namespace}/{name}/v1/plan", self._put)])
        app.add_routes([web.get("/{namespace}/{name}/v1/report", self._get)])

        async def open_() -> None:
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            self.url = f"http://127.0.0.1:{port}/{{namespace}}/{{name}}"
            self._ready.set()

        self._loop.run_until_complete(open_())
        self._loop.run_forever()

    def _speaker(self, request: web.Request) -> FakeCoordinator:
        found = self._beside.get(request.match_info["name"], self)
        if not found.is_there:
            raise web.HTTPBadGateway(text="no coordinator is there")
        return found

    async def _put(self, request: web.Request) -> web.Response:
        return await self._speaker(request)._take(request)

    async def _get(self, request: web.Request) -> web.Response:
        return await self._speaker(request)._tell(request)

    async def _take(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers["Authorization"].removeprefix("Bearer "))
        plan = Plan.model_validate_json(await request.text())
        with self._lock:
            if plan.generation < self._generation:
                raise web.HTTPConflict
            self.plans.append(plan)
            self._names |= {task.uid: task.name for task in plan.tasks}
            self._total |= {task.uid: task.training.max_steps or 4 for task in plan.tasks}
            self._generation = plan.generation
            self._admitted = {task.uid for task in plan.tasks if task.admitted}
            self._tasks = {
                task.uid: self._tasks.get(task.uid, TaskReport(uid=task.uid, phase=TaskPhase.PREPARING))
                for task in plan.tasks
            }
        return web.Response(status=204)

    async def _tell(self, request: web.Request) -> web.Response:
        if "after" in request.query:
            await asyncio.sleep(0.2)
        with self._lock:
            self._sequence += 1
            self._tasks = {uid: self._moved(task) for uid, task in self._tasks.items()}
            report = Report(
                run_id=self.run_id,
                sequence=self._sequence,
                plan_generation=self._generation,
                ready=True,
                facts=FACTS,
                stages=STAGES,
                tasks=tuple(self._tasks.values()),
            )
        return web.Response(text=report.to_json(), content_type="application/json")

    def _moved(self, task: TaskReport) -> TaskReport:
        if task.phase is self.hold:
            return task
        data = DataCounts(rows=10, used=10)
        match task.phase:
            case TaskPhase.PREPARING:
                prepared = {"phase": TaskPhase.PREPARED, "data": data, "total_steps": self._total[task.uid]}
                return task.model_copy(update=prepared)
            case TaskPhase.PREPARED if task.uid in self._admitted:
                return task.model_copy(update={"phase": TaskPhase.TRAINING})
            case TaskPhase.TRAINING if task.step < task.total_steps:
                self.steps[self._names[task.uid]] += 1
                return task.model_copy(update={"step": task.step + 1, "loss": 2.0 / (task.step + 1)})
            case TaskPhase.TRAINING:
                return task.model_copy(update={"phase": TaskPhase.SAVING})
            case TaskPhase.SAVING:
                self.uploads.append(self._names[task.uid])
                adapter = AdapterInfo(uri="s3://adapters/x", sha256="ab" * 32, bytes=123)
                return task.model_copy(update={"phase": TaskPhase.SUCCEEDED, "adapter": adapter})
            case _:
                return task


FACTS = toy_facts(layers=2)
STAGES = toy_stages(layers=2)


class Operator:
    """One operator process over one namespace."""

    def __init__(self, kubeconfig: Path, settings: dict[str, Any], folder: Path) -> None:
        self.port = free_port()
        self.log = folder / "operator.log"
        self._kubeconfig = kubeconfig
        self._settings = folder / "settings.json"
        self._settings.write_text(json.dumps({**settings, "health": {"port": self.port}}))
        self._process: subprocess.Popen[bytes] | None = None
        self.program: tuple[str, ...] = ("-m", "mlora_operator")

    def start(self) -> None:
        env = {
            **os.environ,
            "KUBECONFIG": str(self._kubeconfig),
            "MLORA_SETTINGS": str(self._settings),
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("operator", "worker")),
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.program], env=env, stdout=log, stderr=log, cwd=self.log.parent
            )
        until(lambda: self.health() == 200, what="the operator is healthy", log=self.log)

    def health(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=2) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def stop(self) -> int:
        """Ask it to end as the kubelet does; the exit status."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._process = None


@pytest.fixture(scope="session")
def crds(kubectl: Kubectl) -> None:
    """The two resources, as they are in the repository."""
    kubectl("apply", "--filename", str(ROOT / "crds"))
    kubectl(
        "wait",
        "--for=condition=Established",
        "--timeout=30s",
        "crd/loratasks.mlora.dev",
        "crd/lorapipelines.mlora.dev",
    )


@pytest.fixture(scope="module")
def alone(kubectl: Kubectl) -> Iterator[None]:
    """An installed operator that looks at all namespaces, such as the quick start's, rests: it would answer too."""
    ours = ("--all-namespaces", "--selector", "app.kubernetes.io/name=mlora-operator")
    resting: list[tuple[Kubectl, str, int]] = []
    for one in kubectl.json("get", "deployments", *ours)["items"]:
        there, name = kubectl.within(one["metadata"]["namespace"]), one["metadata"]["name"]
        settings = json.loads(there.json("get", "configmap", name)["data"]["settings.json"])
        if one["spec"]["replicas"] and not settings.get("watchNamespaces"):
            there("scale", "deployment", name, "--replicas=0")
            there("wait", "--for=delete", "pods", *ours[1:], "--timeout=60s")
            resting.append((there, name, one["spec"]["replicas"]))
    yield
    for there, name, replicas in resting:
        there("scale", "deployment", name, f"--replicas={replicas}")


@dataclass(frozen=True)
class House:
    """What the tests of one file share: a start of the operator takes seconds."""

    kubectl: Kubectl
    namespace: str
    operator: Operator
    coordinator: FakeCoordinator


@pytest.fixture(scope="module")
def house(
    crds: None,  # noqa: ARG001
    alone: None,  # noqa: ARG001
    cluster: Cluster,
    kubectl: Kubectl,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[House]:
    """An operator with a namespace of its own. Its pods find no node, so that only the API server works."""
    models = [
        {
            "name": MODEL,
            "uri": "s3://models/toy",
            "stages": 2,
            "idleTimeout": "2s",
            "worker": {"nodeSelector": {"nowhere": "yes"}},
        }
    ]
    with _open_house(cluster, kubectl, tmp_path_factory.mktemp("operator"), models) as opened:
        yield opened


# Runs in place of the worker, in its image: a rank as the kubelet sees it.
STAND_IN = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("", 8080), Answer).serve_forever()
"""


@pytest.fixture(scope="module")
def lived_in(
    crds: None,  # noqa: ARG001
    alone: None,  # noqa: ARG001
    cluster: Cluster,
    kubectl: Kubectl,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[House]:
    """The same with pods that run and become ready. The stand-in is Python's ``sitecustomize``, so nothing of the pod but
    its program differs from a real worker's.
    """
    worker = {
        "image": cluster.worker_image,
        "imagePullPolicy": "Never" if cluster.own else "IfNotPresent",
        "env": [{"name": "PYTHONPATH", "value": "/stand-in"}],
        "volumes": [{"name": "stand-in", "configMap": {"name": "stand-in"}}],
        "volumeMounts": [{"name": "stand-in", "mountPath": "/stand-in"}],
    }
    common = {"stages": 2, "startTimeout": "5s", "worker": worker}
    models = [
        {"name": MODEL, "uri": "s3://models/toy", "idleTimeout": "3s", **common},
        {"name": OTHER_MODEL, "uri": "s3://models/other", "idleTimeout": "1h", **common},
        {"name": THIRD_MODEL, "uri": "s3://models/third", "idleTimeout": "1h", **common},
    ]
    with _open_house(cluster, kubectl, tmp_path_factory.mktemp("operator"), models) as opened:
        opened.kubectl.create(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "stand-in"},
                "data": {"sitecustomize.py": STAND_IN},
            }
        )
        yield opened


@contextlib.contextmanager
def _open_house(
    cluster: Cluster, kubectl: Kubectl, folder: Path, models: list[dict[str, Any]]
) -> Iterator[House]:
    namespace = f"test-operator-{secrets.token_hex(4)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl.create(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}
    )
    coordinator = FakeCoordinator()
    coordinator.start()
    settings = {
        "namespace": namespace,
        "watchNamespaces": [namespace],
        "worker": {"image": "worker:1"},
        "coordinatorTls": False,
        "coordinatorUrl": coordinator.url,
        "models": models,
    }
    operator = Operator(cluster.kubeconfig, settings, folder)
    operator.start()
    yield House(kubectl.within(namespace), namespace, operator, coordinator)
    operator.stop()
    coordinator.stop()
    kubectl("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(holds: Callable[[], Any], what: str, seconds: float = 30, log: Path | None = None) -> Any:
    """Wait until ``holds`` gives something true, and give it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = holds()
        if found:
            return found
        time.sleep(0.2)
    said = f"\n{log.read_text()[-5000:]}" if log is not None and log.exists() else ""
    raise AssertionError(f"after {seconds:g} s not: {what}{said}")


def task_manifest(name: str = "t1", **spec: Any) -> dict[str, Any]:
    return loratask(
        name,
        {
            "baseModel": MODEL,
            "dataset": {"inline": '{"prompt": "a", "completion": "b"}\n'},
            "output": {"uri": f"s3://adapters/{name}"},
            **spec,
        },
    )


class Bench:
    """What a test needs to look at its namespace."""

    def __init__(self, house: House) -> None:
        self.kubectl = house.kubectl
        self.namespace = house.namespace
        self.operator = house.operator
        self.coordinator = house.coordinator

    def clear(self) -> None:
        """Leave nothing of the test before."""
        kinds = "loratasks,lorapipelines,resourcequotas,events"
        self.kubectl("delete", kinds, "--all", "--timeout=20s")
        ours = ("--selector", "app.kubernetes.io/managed-by=mlora-operator")
        self.until(
            lambda: self.kubectl.json("get", "service,statefulset,secret,pods", *ours)["items"] == [],
            "the children of the former test are gone",
            60,
        )
        self.kubectl("delete", "secrets", "--all")
        self.coordinator.reset()

    def apply(self, name: str = "t1", **spec: Any) -> None:
        self.kubectl.apply(task_manifest(name, **spec))

    def status(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.kubectl.json("get", kind, name).get("status", {})
        return found

    def condition(self, name: str, type_: str, kind: str = "loratask") -> tuple[str, str, str]:
        """(status, reason, message), empty strings when there is no such condition."""
        for one in self.status(kind, name).get("conditions", ()):
            if one["type"] == type_:
                return one["status"], one["reason"], one["message"]
        return "", "", ""

    def until(self, holds: Callable[[], Any], what: str, seconds: float = 30) -> Any:
        return until(holds, what, seconds, self.operator.log)

    def pipeline(self) -> str:
        """Name of the only pipeline, once it is there."""

        def names() -> list[str]:
            return [one["metadata"]["name"] for one in self.kubectl.json("get", "lorapipelines")["items"]]

        return str(self.until(names, "a pipeline is there")[0])

    def child(self, kind: str) -> dict[str, Any]:
        """The only Service or StatefulSet of the operator, once it is there."""

        def found() -> list[dict[str, Any]]:
            items: list[dict[str, Any]] = self.kubectl.json(
                "get", kind, "--selector", "app.kubernetes.io/managed-by=mlora-operator"
            )["items"]
            return items

        return dict(self.until(found, f"a {kind} is there")[0])


@pytest.fixture
def bench(house: House) -> Bench:
    made = Bench(house)
    made.clear()
    return made


@pytest.fixture
def bench_with_pods(lived_in: House) -> Bench:
    made = Bench(lived_in)
    made.clear()
    return made
