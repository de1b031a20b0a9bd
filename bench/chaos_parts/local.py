"""The world on one machine without Kubernetes: store, weather, nursery, API server, kubelet, operators."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from bench.chaos_parts import work
from bench.chaos_parts.api import ApiServer
from bench.chaos_parts.built import Built
from bench.chaos_parts.control import Control
from bench.chaos_parts.coordinator import ask
from bench.chaos_parts.kubelet import Kubelet
from bench.chaos_parts.operator import SOCKET
from bench.chaos_parts.processes import Process, Processes
from bench.chaos_parts.reader import Reader
from bench.chaos_parts.story import Fault
from bench.chaos_parts.weather import Weather
from bench.chaos_parts.world import NAMESPACE, REMEMBERED, Tasks, wait_until
from mlora_operator.api import pipeline as lorapipeline
from mlora_operator.api import task as loratask
from mlora_operator.reconcile.state.snapshot import Key
from mlora_worker.protocol import ModelSource
from tests.cluster import s3 as seaweedfs
from tests.cluster.environment import program_of_environment
from tests.fixtures.storage import Storage, connect

PIPELINE = Key(NAMESPACE, "tiny")
PATIENCE = 120.0  # seconds for all to go on after a fault
REPORT_WITHIN = 1.0  # seconds


class LocalWorld(Built):
    """A ``World``, and a context manager."""

    def __init__(self, folder: Path, seed: int, stall: str) -> None:
        super().__init__()
        self.folder, self._seed, self._stall = folder, seed, stall
        self.stages, self.moment_within = work.STAGES, 20.0
        self.operators: list[Process] = []
        self.tasks = Tasks()

    def _build(self) -> None:
        access = self._stack.enter_context(
            seaweedfs.serve(program_of_environment("weed"), self.folder / "store")
        )
        self.processes = self._stack.enter_context(Processes(self.folder / "logs"))
        self.store: Storage = connect(access)
        self.weather = Weather(access.endpoint, Random(self._seed), REMEMBERED)
        self._stack.callback(self.weather.close)
        self.processes.wait_ready()
        work.fill(self.store, self.processes, self.folder / "model")
        self.reader = Reader(connect(access).client, "adapters")
        self._stack.callback(self.reader.close)
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

    def start_operator(self) -> Process:
        process = self.processes.start("operator", {SOCKET: str(self._socket)}, "operator.log")
        self.operators.append(process)
        return process

    # --- tasks --------------------------------------------------------------------------------------------------

    def apply(self, kind: int, name: str, steps: int, every: int) -> None:
        spec = work.task_spec(kind, name, steps, every, self.weather.endpoint)
        self.tasks.uids[name] = self.api.create(loratask.KIND, Key(NAMESPACE, name), spec)

    def unfinished(self) -> dict[str, dict[str, Any]]:
        return self.tasks.unfinished(
            self.api.of_kind(loratask.KIND), lambda name: self.api.delete(loratask.KIND, Key(NAMESPACE, name))
        )

    # --- faults -------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault, rank: int, look: Callable[[], None]) -> None:
        match fault.kind:
            case "kill_rank" | "kill_coordinator":
                self._signal(rank, signal.SIGKILL, look)
            case "freeze_rank" | "freeze_coordinator":
                self._signal(rank, signal.SIGSTOP, look)
            case "drain_rank" | "drain_coordinator":
                look()
                uid = self.kubelet.uid(rank)
                if uid is not None:
                    self.kubelet.delete(uid)
            case "kill_while_s3_is_away":
                time.sleep(fault.seconds / 2)
                self._signal(rank, signal.SIGKILL, look)
            case "kill_operator":
                self.operators.pop().send(signal.SIGKILL)
            case "two_operators":
                self.start_operator()
                time.sleep(2 + fault.seconds)
                self.operators.pop(0).send(signal.SIGKILL)

    def _signal(self, rank: int, number: signal.Signals, look: Callable[[], None]) -> None:
        """To a rank; one that is between two starts is waited for."""
        self.until(lambda: self.kubelet.process(rank) is not None, f"rank {rank} runs")
        look()
        process = self.kubelet.process(rank)
        if process is not None:
            process.send(number)

    def mend(self, fault: Fault) -> None:
        if fault.kind == "kill_operator":
            time.sleep(fault.seconds / 2)
            looks = self.control.looks
            self.start_operator()
            self.until(lambda: self.control.looks > looks + 1, "the new operator looks")

    # --- what is known ------------------------------------------------------------------------------------------

    def report(self) -> Mapping[str, Any] | None:
        return ask(self.kubelet.url, self.kubelet.token, REPORT_WITHIN)

    def until(self, done: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        wait_until(done, what, PATIENCE if seconds is None else seconds, 0.05, self.state)

    @property
    def broken(self) -> Sequence[str]:
        return self.api.broken

    def facts(self) -> Mapping[str, Any]:
        return {"cluster": False, "rank_starts": self.kubelet.starts}

    def state(self) -> str:
        """For whoever has to find out why."""
        tasks = {name: raw["status"].get("state") for name, raw in self.unfinished().items()}
        lines = [f"tasks {tasks}", f"group {self.kubelet.group()}", f"report {str(self.report())[-1500:]}"]
        for path in sorted((self.folder / "logs").glob("*.log")):
            lines += [f"--- {path.name}", path.read_text(errors="replace")[-1500:]]
        return "\n".join(lines)
