"""All parts together: store, weather, nursery, API server, kubelet, operators, and the stream of tasks."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

from bench.chaos_parts import work
from bench.chaos_parts.api import ApiServer
from bench.chaos_parts.control import Control
from bench.chaos_parts.kubelet import Kubelet
from bench.chaos_parts.operator import SOCKET
from bench.chaos_parts.processes import Process, Processes
from bench.chaos_parts.reader import Reader
from bench.chaos_parts.weather import Weather
from mlora_operator.api import pipeline as lorapipeline
from mlora_operator.api import task as loratask
from mlora_operator.reconcile.snapshot import Key
from mlora_worker.protocol import ModelSource
from tests.cluster import s3 as seaweedfs
from tests.cluster.environment import program_of_environment
from tests.fixtures.faulty_world import end_of
from tests.fixtures.storage import Storage, connect

NAMESPACE = "chaos"
PIPELINE = Key(NAMESPACE, "tiny")
REMEMBERED = r"^adapters/chaos/[^/]+/(manifest\.json|adapter_model\.safetensors)$"


class Stuck(RuntimeError):
    """Something that has to come did not come in time."""


class World:
    """A context manager. The weather is fine, and one operator runs."""

    def __init__(self, folder: Path, seed: int, stall: str) -> None:
        self.folder, self._seed, self._stall = folder, seed, stall
        self._stack = ExitStack()
        self.operators: list[Process] = []
        self.uids: dict[str, str] = {}  # of all tasks that were ever applied, by name
        self.ends: dict[str, str] = {}  # how those that have ended did, by name
        self.why: dict[str, str] = {}  # what was said of those that failed

    def __enter__(self) -> World:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _build(self) -> None:
        access = self._stack.enter_context(
            seaweedfs.serve(program_of_environment("weed"), self.folder / "store")
        )
        self.processes = self._stack.enter_context(Processes(self.folder / "logs"))
        self.store: Storage = connect(access)
        self.weather = Weather(access.endpoint, Random(self._seed), REMEMBERED)
        self._stack.callback(self.weather.close)
        self.processes.wait_ready()
        self._fill()
        self.reader = Reader(connect(access).client, "adapters")
        self.api = ApiServer()
        secret = {"AWS_ACCESS_KEY_ID": access.access_key, "AWS_SECRET_ACCESS_KEY": access.secret_key}
        self.api.put_secret(Key(NAMESPACE, work.SECRET), secret)
        self.api.create(lorapipeline.KIND, PIPELINE, work.pipeline_spec(self.weather.endpoint, self._stall))
        self.kubelet = Kubelet(
            self.processes,
            PIPELINE,
            ModelSource(name=work.BASE_MODEL, uri=work.MODEL_URI, dtype="float32"),
            work.STAGES,
            work.MICROBATCH_TOKENS,
            self.weather.endpoint,
            (access.access_key, access.secret_key),
            self.folder / "private",
            self.api.note,
        )
        self._socket = self.folder / "control"
        self.control = Control(self._socket, self.api, self.kubelet, PIPELINE)
        self._stack.callback(self.control.close)
        self.start_operator()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _fill(self) -> None:
        """The model and the rows, in the store."""
        model = self.folder / "model"
        self.processes.run("model", {"CHAOS_MODEL": str(model)}, "model.log")
        for path in sorted(model.iterdir()):
            self.store.client.put_object(Bucket="models", Key=f"tiny/{path.name}", Body=path.read_bytes())
        self.store.client.put_object(Bucket="datasets", Key=work.ROWS_KEY, Body=work.rows())

    def start_operator(self) -> Process:
        process = self.processes.start("operator", {SOCKET: str(self._socket)}, "operator.log")
        self.operators.append(process)
        return process

    # --- tasks --------------------------------------------------------------------------------------------------

    def apply(self, kind: int, name: str, steps: int, every: int) -> None:
        spec = work.task_spec(kind, name, steps, every, self.weather.endpoint)
        self.uids[name] = self.api.create(loratask.KIND, Key(NAMESPACE, name), spec)

    def unfinished(self) -> dict[str, dict[str, Any]]:
        """By name. Those that have ended are noted, and deleted as a user would."""
        left = {}
        for raw in self.api.of_kind(loratask.KIND):
            name, end = raw["metadata"]["name"], end_of(raw["status"])
            if end is None:
                left[name] = raw
                continue
            self.ends[name] = end
            if end != "Succeeded":
                held = {one["type"]: one for one in raw["status"]["conditions"]}
                self.why[name] = f"{held[end]['reason']}: {held[end]['message']}"
            self.api.delete(loratask.KIND, Key(NAMESPACE, name))
        return left

    def all_started(self) -> bool:
        """No task is still to be prepared for the first time: what the store refuses then is the task's end, by design."""
        return all(raw["status"].get("step") for raw in self.unfinished().values())

    # --- what the coordinator says ------------------------------------------------------------------------------

    def report(self, seconds: float = 1.0) -> Mapping[str, Any] | None:
        """The coordinator's report now, or None when it does not answer in time."""
        request = urllib.request.Request(
            f"{self.kubelet.url}/v1/report", headers={"Authorization": f"Bearer {self.kubelet.token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                found: Mapping[str, Any] = json.loads(answer.read())
                return found
        except (OSError, ValueError):
            return None

    def until(self, done: Any, what: str, seconds: float = 120.0, every: float = 0.05) -> None:
        """Raises Stuck, with what is known, when ``done`` is not true within ``seconds``."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise Stuck(f"{what}: not within {seconds:.0f} s\n{self.state()}")
            time.sleep(every)

    def state(self) -> str:
        """For whoever has to find out why."""
        tasks = {name: raw["status"].get("state") for name, raw in self.unfinished().items()}
        lines = [f"tasks {tasks}", f"group {self.kubelet.group()}", f"report {str(self.report())[-1500:]}"]
        for path in sorted((self.folder / "logs").glob("*.log")):
            lines += [f"--- {path.name}", path.read_text(errors="replace")[-1500:]]
        return "\n".join(lines)


class Feeder:
    """A user who always has ``active`` tasks unfinished, until told to end; and none more in bad weather."""

    def __init__(self, world: World, active: int, steps: int, every: int) -> None:
        self._world, self._active, self._steps, self._every = world, active, steps, every
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._thread.start()

    def pause(self, paused: bool) -> None:
        with self._lock:
            self._paused = paused

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(0.2):
            missing = self._active - len(self._world.unfinished())
            with self._lock:
                for _ in range(0 if self._paused else missing):
                    self._world.apply(number % len(work.KINDS), f"task-{number}", self._steps, self._every)
                    number += 1
