"""Real ranks of one pipeline on this machine, spoken to as the operator does: a plan by PUT, reports by long poll."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType

from bench.forks import die_with_parent
from bench.rows import FIELDS, GSM8K, MAX_SEQ_LENGTH
from bench.sides import Setting
from mlora_worker.protocol import (
    Dataset,
    ModelSource,
    Plan,
    Report,
    Schedule,
    TaskPhase,
    TaskPlan,
    Training,
    WorkerConfig,
)
from mlora_worker.stream.timeline import Timeline

HOST = "127.0.0.1"
MODEL_NAME = "base"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks run: all on this machine's loopback unless said."""

    host: str = HOST  # rank 0's address, for the other ranks and for this process
    prefixes: Sequence[Sequence[str]] = ()  # of each rank's command
    environments: Sequence[Mapping[str, str]] = ()  # of each rank, beside its own

    def prefix(self, rank: int) -> Sequence[str]:
        return self.prefixes[rank] if self.prefixes else ()

    def environment(self, rank: int) -> Mapping[str, str]:
        return self.environments[rank] if self.environments else {}


ON_LOOPBACK = Placement()


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def processes(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    logs: Path,
    *,
    talk: bool = False,
    placement: Placement = ON_LOOPBACK,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start ``command`` once in each environment; end all that still run. They die with this process.

    What they write goes to ``logs``; with ``talk``, their standard input and output are pipes.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLORA_")}
    started: list[subprocess.Popen[str]] = []
    try:
        for number, environment in enumerate(environments):
            with (logs / f"{number}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [*placement.prefix(number), *command],
                        env={**inherited, **placement.environment(number), **environment},
                        stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                        stdout=subprocess.PIPE if talk else log,
                        stderr=log,
                        text=True,
                        preexec_fn=die_with_parent,
                    )
                )
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def logs_of(folder: Path) -> str:
    """The ends of what the processes of ``folder`` wrote."""
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.log")))


class Ranks:
    """A started pipeline; a context manager. Raises RuntimeError with the logs' ends when a rank ends."""

    def __init__(
        self,
        model: Path,
        stages: int,
        folder: Path,
        threads: int,
        dtype: str = "float32",
        placement: Placement = ON_LOOPBACK,
    ) -> None:
        folder.mkdir(parents=True)
        self._placement = placement
        self._folder, self._token = folder, secrets.token_hex(16)
        (folder / "token").write_text(self._token)
        http, link, rendezvous = free_ports(3, placement.host)
        self.config = WorkerConfig(
            pipeline="bench/ranks",
            model=ModelSource.model_validate({"name": MODEL_NAME, "uri": f"file://{model}", "dtype": dtype}),
            stages=stages,
            coordinator_host=placement.host,
            http_port=http,
            link_port=link,
            rendezvous_port=rendezvous,
            token_file=str(folder / "token"),
            cache_dir=str(folder / "cache"),
            device="cpu",
            threads=threads,
            allow_file_uris=True,
            allowed_networks=("127.0.0.0/8",),  # of the store
        )
        self._generation = 0
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Ranks:
        environments = [
            {
                "MLORA_WORKER_CONFIG": self.config.to_json(),
                "MLORA_RANK": str(rank),
                "OMP_NUM_THREADS": str(self.config.threads),
            }
            for rank in range(self.config.stages)
        ]
        command = [sys.executable, "-m", "mlora_worker"]
        self._processes = self._stack.enter_context(
            processes(command, environments, self._folder, placement=self._placement)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def plan(self, tasks: Sequence[TaskPlan], seconds: float = 600.0) -> None:
        """Send the whole wish, as soon as the coordinator takes it."""
        self._generation += 1
        body = Plan(generation=self._generation, tasks=tuple(tasks)).to_json()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._check_alive()
            try:
                self._call("PUT", "/v1/plan", body)
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise RuntimeError(f"the plan was refused: {error.read().decode()}") from error
                time.sleep(0.1)
            except OSError:  # not listening yet
                time.sleep(0.1)
            else:
                return
        raise RuntimeError(f"the coordinator took no plan within {seconds:.0f} s\n{logs_of(self._folder)}")

    def reports(
        self,
        seconds: float = 900.0,
        *,
        tasks_may_fail: bool = False,
        wait: float = 5.0,
        repeat: bool = False,
    ) -> Iterator[tuple[float, Report]]:
        """Each report as it comes, with the time of its coming (``time.perf_counter``). Raises RuntimeError when a
        task fails, unless it may. ``wait``: for a new one; with ``repeat``, the same one comes again after that.
        """
        deadline, after = time.monotonic() + seconds, -1
        while time.monotonic() < deadline:
            self._check_alive()
            report = Report.model_validate_json(self._call("GET", f"/v1/report?after={after}&wait={wait:g}"))
            came = time.perf_counter()
            for task in report.tasks:
                if task.phase is TaskPhase.FAILED and not tasks_may_fail:
                    raise RuntimeError(f"task {task.uid} failed: {task.failure}\n{logs_of(self._folder)}")
            if repeat or report.sequence != after:
                yield came, report
            after = report.sequence
        raise RuntimeError(f"not done within {seconds:.0f} s\n{logs_of(self._folder)}")

    def wait_for(self, done: Callable[[Report], bool], seconds: float = 900.0) -> Report:
        for _, report in self.reports(seconds):
            if done(report):
                return report
        raise AssertionError("reports() either yields or raises")

    def timeline(self) -> Timeline:
        """What the stages did lately."""
        return Timeline.model_validate_json(self._call("GET", "/v1/timeline"))

    def _check_alive(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise RuntimeError(f"a rank ended\n{logs_of(self._folder)}")

    def _call(self, method: str, path: str, body: str | None = None) -> str:
        request = urllib.request.Request(
            f"http://{self._placement.host}:{self.config.http_port}{path}",
            method=method,
            data=body.encode() if body is not None else None,
            headers={"Authorization": f"Bearer {self._token}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text


def task_plans(
    setting: Setting, batch: int, steps: int, learning_rate: float, run: str, output: Path
) -> list[TaskPlan]:
    """Tasks on the GSM8K rows, each with a seed of its own and so with rows in an order of its own; ``run`` makes
    their uids new.
    """
    return [
        TaskPlan(
            uid=f"{run}-{number}",
            namespace="bench",
            name=f"{run}-{number}",
            admitted=True,
            base_model=MODEL_NAME,
            lora=setting.lora,
            dataset=Dataset(uri=f"file://{GSM8K}", fields=FIELDS),
            training=training(batch, number, steps, learning_rate),
            output_uri=f"file://{output}/{run}-{number}",
        )
        for number in range(setting.tasks)
    ]


def training(batch: int, number: int, steps: int, learning_rate: float) -> Training:
    """Of task ``number``."""
    return Training(
        batch_size=batch,
        max_steps=steps,
        learning_rate=learning_rate,
        schedule=Schedule.CONSTANT,
        max_seq_length=MAX_SEQ_LENGTH,
        seed=number,
    )
