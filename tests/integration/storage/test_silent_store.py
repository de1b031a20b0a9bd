"""A store that swallows requests holds up nobody who wants another one, and what waited for it gets there at last."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.coordinator.uploads.fair_queue import FairQueue
from mlora_worker.coordinator.uploads.retrier import Attempt, UploadRetrier, WorkPool
from mlora_worker.coordinator.uploads.store_identity import output_store
from mlora_worker.coordinator.uploads.timer import DelayedCalls
from mlora_worker.protocol import Dataset, FailureReason, LoRAConfig, StorageAccess, TaskPlan, Training
from mlora_worker.storage.object_store.s3_client import S3Timeouts as Timeouts
from mlora_worker.storage.object_store.store import open_store
from tests.fixtures.storage import Storage

pytestmark = pytest.mark.integration

BLOCKED = 64
SOON = 60.0  # seconds, on a machine that has much else to do
TIMEOUTS = Timeouts(connect_seconds=SOON, read_seconds=3 * SOON, attempts=1)  # longer than the test


class Swallower:
    """Takes every connection and reads nothing, until ``drop`` cuts it; once ``answers``, it passes new ones on."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target, self._open = target, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.answers = False
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self) -> None:
        """As where the patience of all that wait is over."""
        dropped, self._open = self._open, []
        for one in dropped:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(inner)
            if self.answers:
                outer = socket.create_connection(self._target)
                self._open.append(outer)
                for one, other in ((inner, outer), (outer, inner)):
                    threading.Thread(target=_pump, args=(one, other), daemon=True).start()


def _pump(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


@pytest.fixture
def silent(local_s3: Storage) -> Iterator[Swallower]:
    host, _, port = local_s3.endpoint.removeprefix("http://").partition(":")
    swallower = Swallower((host, int(port)))
    yield swallower
    swallower.close()


@dataclass
class Uploads:
    """A coordinator's threads for storing, on real stores."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    at_work: int = 0
    most_at_work: int = 0  # at once, for tenant a
    stored: dict[str, float] = field(default_factory=dict)  # when

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(16)
        self.pool = WorkPool(self.threads, FairQueue(16))
        self.retrier = UploadRetrier(
            changed=self.changed, on_change=self.changed.notify_all, later=DelayedCalls()
        )

    def begin(self, task: TaskRun) -> TaskRun:
        def work() -> None:
            with self._counted(task):
                store = open_store(
                    task.plan.storage, allow_files=False, allowed_networks=("127.0.0.0/8",), timeouts=TIMEOUTS
                )
                store.write(f"{task.plan.output_uri}/x", task.plan.name.encode())

        def done(_: None) -> None:
            with self.changed:
                self.stored[task.plan.name] = time.monotonic()
                self.changed.notify_all()

        self.retrier.begin(
            self.pool,
            Attempt(task, "uploading", work, done, pytest.fail, store=lambda: output_store(task.plan)),
        )
        return task

    def wait_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        with self.changed:
            return self.changed.wait_for(holds, seconds)

    @contextlib.contextmanager
    def _counted(self, task: TaskRun) -> Iterator[None]:
        mine = task.plan.namespace == "a"
        with self.changed:
            self.at_work += mine
            self.changed.notify_all()
            self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            yield
        finally:
            with self.changed:
                self.at_work -= mine
                self.changed.notify_all()


def test_64_uploads_to_a_silent_store_delay_no_other_and_are_made_when_it_answers(
    local_s3: Storage, silent: Swallower
) -> None:
    run = uuid.uuid4().hex

    def upload(name: str, namespace: str, endpoint: str, secret: str = local_s3.secret_key) -> TaskRun:
        access = {"endpoint": endpoint, "accessKey": local_s3.access_key, "secretKey": secret}
        return TaskRun(
            TaskPlan(
                uid=name, namespace=namespace, name=name, base_model="m", lora=LoRAConfig(),
                dataset=Dataset(inline="{}"), training=Training(), output_uri=f"s3://adapters/{run}/{name}",
                storage=StorageAccess.model_validate(access),
            )
        )  # fmt: skip

    uploads = Uploads()
    blocked = [uploads.begin(upload(f"away-{number}", "a", silent.endpoint)) for number in range(BLOCKED)]
    other_tenants = [uploads.begin(upload(f"b-{number}", "b", local_s3.endpoint)) for number in range(8)]
    other_stores = [uploads.begin(upload(f"a-{number}", "a", local_s3.endpoint)) for number in range(3)]
    others = {task.plan.name for task in (*other_tenants, *other_stores)}
    assert uploads.wait_until(lambda: others <= uploads.stored.keys(), SOON), (
        "who waits for the silent store?"
    )
    with uploads.changed:
        assert uploads.at_work == 6, "a third of the threads is at the silent store, and is there still"
        assert [task.blocked for task in blocked] == [None] * BLOCKED
    silent.drop()
    assert uploads.wait_until(lambda: all(task.blocked is not None for task in blocked), SOON)
    reasons = {task.blocked.reason for task in blocked if task.blocked is not None}
    assert reasons == {FailureReason.STORAGE_UNREACHABLE}

    assert uploads.wait_until(lambda: uploads.at_work == 1, SOON), "it is probed"
    with uploads.changed:
        uploads.most_at_work = uploads.at_work
    denied = uploads.begin(upload("denied", "b", local_s3.endpoint, secret="wrong"))
    assert uploads.wait_until(lambda: denied.blocked is not None, SOON)
    with uploads.changed:
        denied.plan = upload("denied", "b", local_s3.endpoint).plan
        uploads.retrier.look_again({"denied"})
    assert uploads.wait_until(lambda: "denied" in uploads.stored, SOON)
    silent.drop()
    assert uploads.wait_until(lambda: uploads.at_work == 0, SOON)
    assert uploads.wait_until(lambda: uploads.at_work == 1, SOON), "it is probed again"
    assert len(uploads.stored) == len(others) + 1
    assert uploads.most_at_work == 1, "one upload at a time asks the silent store"

    silent.answers = True
    silent.drop()
    assert uploads.wait_until(lambda: len(uploads.stored) == BLOCKED + len(others) + 1, 2 * SOON)
    assert all(task.blocked is None for task in (*blocked, denied))
    assert len(local_s3.keys("adapters", run)) == BLOCKED + len(others) + 1
    uploads.threads.shutdown()
