"""The kubelet's part of the world, and the StatefulSet controller's: pods on this machine, of one pipeline.

A process that ends is started again in the same pod, whatever the other ranks do, after a short pause; a pod that is
deleted gets SIGTERM, then SIGKILL, and another pod takes its place. There is no liveness probe: a rank that stands still is
the operator's to find.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bench.chaos_parts.processes import Process, Starter
from mlora_operator.local.ranks import HOST, free_ports
from mlora_operator.reconcile.state.snapshot import Key, Pod, ProcessEnding, WorkerGroup
from mlora_worker.protocol import ModelSource, WorkerConfig

GRACE = 8.0  # seconds between SIGTERM and SIGKILL
PAUSE = 0.2  # seconds before a process is started again in its pod
_PROBE_EVERY = 0.1
_TAIL = 400  # characters of a log that say how it ended


@dataclass(slots=True)
class _Running:
    pod: Pod
    process: Process | None = None


class Kubelet:
    """Thread-safe. ``on_change`` is called after every change of what ``group`` shows."""

    def __init__(
        self,
        processes: Starter,
        pipeline: Key,
        model: ModelSource,
        stages: int,
        microbatch_tokens: int,
        endpoint: str,
        keys: tuple[str, str],
        private: Path,
        on_change: Callable[[], None],
        pause: float = PAUSE,
    ) -> None:
        self._processes, self._pipeline, self._on_change = processes, pipeline, on_change
        self._pause = pause
        self._lock = threading.RLock()
        self._pods: dict[int, _Running] = {}
        self._wanted = 0
        self._made = 0
        self.token = secrets.token_urlsafe(32)
        self.starts = 0  # of processes
        self.stages = stages
        ports = free_ports()
        self.url = f"http://{HOST}:{ports.http}"
        private.mkdir(mode=0o700)
        (private / "token").write_text(self.token)
        (private / "keys").mkdir()
        for name, key in zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), keys, strict=True):
            (private / "keys" / name).write_text(key)
        self._caches = private / "caches"
        self._config = WorkerConfig(
            pipeline=str(pipeline),
            model=model,
            stages=stages,
            coordinator_host=HOST,
            http_port=ports.http,
            link_port=ports.link,
            rendezvous_port=ports.rendezvous,
            token_file=str(private / "token"),
            storage_endpoint=endpoint,
            storage_keys_dir=str(private / "keys"),
            termination_seconds=int(GRACE) - 1,
            allowed_networks=("127.0.0.0/8",),  # of the store
            device="cpu",
            threads=1,
            microbatch_tokens=microbatch_tokens,
        )

    # --- the operator's side ------------------------------------------------------------------------------------

    def group(self) -> WorkerGroup | None:
        with self._lock:
            if not self._wanted and not self._pods:
                return None
            return WorkerGroup(self._wanted, "1", tuple(one.pod for one in self._pods.values()))

    def resize(self, replicas: int) -> None:
        with self._lock:
            self._wanted = replicas
            for number in range(replicas):
                if number not in self._pods:
                    self._create(number)
            for number in [number for number in self._pods if number >= replicas]:
                self.delete(self._pods[number].pod.uid)

    def delete(self, uid: str) -> None:
        """As ``kubectl delete pod``: SIGTERM, and SIGKILL after ``GRACE``."""
        with self._lock:
            running = next((one for one in self._pods.values() if one.pod.uid == uid), None)
            if running is None or running.pod.deleting:
                return
            running.pod = replace(running.pod, deleting=True)
            process = running.process
        if process is None:  # between two starts
            self._remove(uid)
        else:
            process.send(signal.SIGTERM)
            timer = threading.Timer(GRACE, process.send, [signal.SIGKILL])
            timer.daemon = True
            timer.start()
        self._on_change()

    # --- the fault's side ---------------------------------------------------------------------------------------

    def process(self, rank: int) -> Process | None:
        """What runs as that rank now."""
        with self._lock:
            running = self._pods.get(rank)
            return running.process if running is not None else None

    def uid(self, rank: int) -> str | None:
        with self._lock:
            running = self._pods.get(rank)
            return running.pod.uid if running is not None else None

    # --- pods and their processes -------------------------------------------------------------------------------

    def _create(self, number: int) -> None:
        self._made += 1
        name = f"{self._pipeline.name}-{number}"
        pod = Pod(Key(self._pipeline.namespace, name), f"{name}.{self._made}", "1", ready=False)
        self._pods[number] = _Running(pod)
        self._start(number)

    def _start(self, number: int) -> None:
        running = self._pods[number]
        uid = running.pod.uid
        # What a pod has on its disk outlives its process, and ends with the pod.
        config = self._config.model_copy(update={"cache_dir": str(self._caches / uid)})
        environment = {"MLORA_WORKER_CONFIG": config.to_json(), "MLORA_RANK": str(number)}
        running.process = self._processes.start(
            "rank", environment, f"rank-{number}.log", lambda process: self._ended(number, uid, process)
        )
        self.starts += 1
        threading.Thread(target=self._probe, args=(number, running.process), daemon=True).start()
        self._on_change()

    def _ended(self, number: int, uid: str, process: Process) -> None:
        """Called when the process of that rank has ended."""
        with self._lock:
            running = self._pods.get(number)
            if running is None or running.process is not process:
                return
            running.process = None
            code = process.code if process.code is not None else 1
            words = f"exit code {code}: {_last_line(process.log)}"
            ending = ProcessEnding(code if code >= 0 else 128 - code, words)
            running.pod = replace(
                running.pod, ready=False, ready_since=None, ended=ending, restarts=running.pod.restarts + 1
            )
            deleting = running.pod.deleting
        self._on_change()
        if deleting:
            self._remove(uid)
            return
        time.sleep(self._pause)
        with self._lock:
            running = self._pods.get(number)
            if (
                running is not None
                and running.pod.uid == uid
                and not running.pod.deleting
                and running.process is None
            ):
                self._start(number)

    def _remove(self, uid: str) -> None:
        with self._lock:
            number = next((number for number, one in self._pods.items() if one.pod.uid == uid), None)
            if number is None:
                return
            del self._pods[number]
            shutil.rmtree(self._caches / uid, ignore_errors=True)
            if number < self._wanted:
                self._create(number)
        self._on_change()

    def _probe(self, number: int, process: Process) -> None:
        """Ready once rank 0 listens; the others once they run."""
        while number == 0 and process.code is None:
            try:
                socket.create_connection((HOST, self._config.http_port), 1).close()
                break
            except OSError:
                time.sleep(_PROBE_EVERY)
        with self._lock:
            running = self._pods.get(number)
            if running is not None and running.process is process and process.code is None:
                running.pod = replace(running.pod, ready=True, ready_since=datetime.now(UTC))
        self._on_change()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace")[-_TAIL * 4 :].splitlines() if line.strip()]
    return lines[-1][-_TAIL:] if lines else "it wrote no output"
