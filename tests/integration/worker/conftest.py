"""A group of real worker processes on loopback, spoken to over the real protocol.

``MLORA_TEST_DEVICE=cuda`` lets the ranks compute on a GPU, which they share.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlora_worker.protocol import ModelSource, Plan, Report, TaskPhase, TaskPlan, TaskReport, WorkerConfig
from tests.fixtures.forked_ranks import Rank

FINISHED = (TaskPhase.SUCCEEDED, TaskPhase.FAILED)


@dataclass
class Group:
    """The ranks of one pipeline. ``start`` may be called again after a rank has died."""

    config: WorkerConfig
    folder: Path
    token: str
    ranks: list[Rank] = field(default_factory=list)
    generation: int = 0

    def start(self) -> None:
        config = self.config.to_json()
        self.ranks = [
            Rank({"MLORA_WORKER_CONFIG": config, "MLORA_RANK": str(rank)}, self.folder / f"rank-{rank}.log")
            for rank in range(self.config.stages)
        ]

    def stop(self) -> None:
        for process in self.ranks:
            process.terminate()
        for process in self.ranks:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def call(
        self, method: str, path: str, body: str | None = None, token: str | None = None
    ) -> tuple[int, str]:
        scheme = "https" if self.config.tls_dir is not None else "http"
        host = self.config.coordinator_host
        host = f"[{host}]" if ":" in host else host
        request = urllib.request.Request(
            f"{scheme}://{host}:{self.config.http_port}{path}",
            method=method,
            data=body.encode() if body is not None else None,
            headers={"Authorization": f"Bearer {self.token if token is None else token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=90, context=self._context()) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def _context(self) -> ssl.SSLContext | None:
        """Whose certificate it is, is not asked here (test_tls.py)."""
        return ssl._create_unverified_context() if self.config.tls_dir is not None else None

    def plan(self, *tasks: TaskPlan) -> None:
        """Send the whole wish, once the coordinator takes it."""
        self.generation += 1
        body = Plan(generation=self.generation, tasks=tasks).to_json()
        self.until(lambda: self.call("PUT", "/v1/plan", body)[0] == 204, "the coordinator takes the plan")

    def report(self, after: int = -1, wait: float = 0.0) -> Report:
        status, text = self.call("GET", f"/v1/report?after={after}&wait={wait}")
        assert status == 200, text
        return Report.model_validate_json(text)

    def wait_for(self, done: Callable[[Report], bool], seconds: float = 300) -> Report:
        """Long-poll until ``done``."""
        deadline, after = time.monotonic() + seconds, -1
        while time.monotonic() < deadline:
            report = self.report(after, wait=5)
            if done(report):
                return report
            after = report.sequence
        raise AssertionError(f"not done within {seconds} s: {report}\n{self.logs()}")

    def finish(self, *tasks: TaskPlan, seconds: float = 300) -> dict[str, TaskReport]:
        """Plan ``tasks`` and wait until each has succeeded or failed; by name."""
        self.plan(*tasks)
        names = {task.uid: task.name for task in tasks}
        report = self.wait_for(
            lambda report: {task.uid for task in report.tasks if task.phase in FINISHED} >= names.keys(),
            seconds,
        )
        return {names[task.uid]: task for task in report.tasks if task.uid in names}

    def until(self, done: Callable[[], bool], what: str, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if done():
                    return
            except OSError:
                pass  # not listening yet
            assert any(process.poll() is None for process in self.ranks), f"all ranks ended\n{self.logs()}"
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {seconds} s\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.folder.glob("rank-*.log")))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@pytest.fixture(scope="session")
def start_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Group]]:
    """``start_group(model_folder, stages=2)``: a started group; what still runs is ended with the session.

    Tests share groups where they can: ranks that read a model and meet take a second or two.
    """
    groups: list[Group] = []

    def start(model: Path, /, stages: int, **options: object) -> Group:
        folder = tmp_path_factory.mktemp(f"group-{len(groups)}")
        token = secrets.token_hex(16)
        (folder / "token").write_text(token)
        http, link, rendezvous = free_ports(3)
        config = WorkerConfig(
            pipeline="test/group",
            model=ModelSource(name="org/tiny", uri=f"file://{model}", dtype="float32"),
            stages=stages,
            coordinator_host="127.0.0.1",
            http_port=http,
            link_port=link,
            rendezvous_port=rendezvous,
            token_file=str(folder / "token"),
            cache_dir=str(folder / "cache"),
            device=os.environ.get("MLORA_TEST_DEVICE", "cpu"),
            backend="gloo",  # so that the ranks may share a GPU
            threads=1,
            allow_file_uris=True,
            allowed_networks=("127.0.0.0/8",),  # of the store
        ).model_copy(update=options)
        group = Group(config, folder, token)
        group.start()
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.stop()


@pytest.fixture(scope="session")
def two_stages(start_group: Callable[..., Group], tiny_model: Path) -> Group:
    """A group of two stages that tests share; each plans tasks with uids of its own."""
    return start_group(tiny_model, stages=2, microbatch_tokens=16_384)


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., TaskPlan]:
    """``make_task("a", rank=4, ...)``: an admitted task on 24 short rows, with its output below the test's folder."""

    def make(
        name: str,
        *,
        lora: dict[str, object] | None = None,
        training: dict[str, object] | None = None,
        **fields: object,
    ) -> TaskPlan:
        rows = [
            {
                "question": f"What is {name} plus {i}? " + "Think. " * (i % 5),
                "answer": f"It is {name}{i}. " + "So. " * (i % 3),
            }
            for i in range(24)
        ]
        plan = {
            "uid": f"uid-{name}",
            "namespace": "test",
            "name": name,
            "admitted": True,
            "baseModel": "org/tiny",
            "lora": {"rank": 4, "alpha": 8, "targetModules": ["q_proj", "v_proj"], **(lora or {})},
            "dataset": {
                "inline": "\n".join(json.dumps(row) for row in rows),
                "fields": {"prompt": "question", "completion": "answer"},
            },
            "training": {
                "batchSize": 4,
                "maxSteps": 5,
                "learningRate": 1e-3,
                "maxSeqLength": 64,
                **(training or {}),
            },
            "outputUri": f"file://{tmp_path}/adapters/{name}",
            **fields,
        }
        return TaskPlan.model_validate_json(json.dumps(plan))

    return make
