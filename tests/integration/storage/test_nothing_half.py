"""Whoever dies while writing, and whenever, and however full the disk is: nobody sees half of anything."""

from __future__ import annotations

import hashlib
import http.client
import os
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from mlora_worker.coordinator.preparation.disk_check import check_disk_space
from mlora_worker.protocol import (
    MANIFEST_NAME,
    AdapterManifest,
    Dataset,
    FailureReason,
    LoRAConfig,
    ModelFacts,
    ModuleShape,
    TaskPlan,
    Training,
)
from mlora_worker.storage.artifacts.adapter import (
    CARD_NAME,
    CONFIG_NAME,
    WEIGHTS_NAME,
    FinishedAdapter,
    adapter_config,
    find_published,
    publish_adapter,
    save_weights,
)
from mlora_worker.storage.artifacts.checkpoint import newest_progress, newest_state, write_checkpoint
from mlora_worker.storage.artifacts.existing_output import MARK_NAME
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from mlora_worker.storage.artifacts.task_state import SavedProgress, TaskState
from mlora_worker.storage.errors import ObjectNotFound, StorageError
from mlora_worker.storage.limits import MOST_LISTED
from mlora_worker.storage.object_store.file_store import FileStore
from mlora_worker.storage.object_store.s3 import Keys, S3Store
from mlora_worker.storage.object_store.store import Store
from mlora_worker.storage.uri import file_uri
from mlora_worker.stream.targets import targets_of
from tests.fixtures.storage import Storage

MOST = 2**30  # bytes

pytestmark = pytest.mark.integration

MIB = 2**20
PART = 5 * MIB  # the smallest that S3 takes
TENSORS = {
    "q.lora_A.weight": torch.ones(11, MIB // 4),
    "q.lora_B.weight": torch.ones(4, 11),
}  # 11 MiB: three parts


def store_of(s3: Storage, endpoint: str | None = None) -> S3Store:
    return S3Store(
        endpoint=endpoint or s3.endpoint,
        region=s3.region,
        keys=lambda: Keys(s3.access_key, s3.secret_key),
        part=PART,
    )


@pytest.fixture
def folder() -> str:
    return f"s3://adapters/{uuid.uuid4().hex}"


def task(output: str) -> TaskPlan:
    return TaskPlan(
        uid="uid", namespace="team-a", name="bot", base_model="acme/tiny",
        lora=LoRAConfig(rank=8, target_modules=("q_proj",)), dataset=Dataset(inline="{}"),
        training=Training(), output_uri=output,
    )  # fmt: skip


def publish(store: Store, output: str, weights: Path, step: int = 1) -> None:
    plan = task(output)
    config = adapter_config(plan.lora, plan.base_model, None, ["q_proj"])
    publish_adapter(store, output, weights, config, task=plan, step=step, loss=1.0, data=None)


def unfinished(s3: Storage, folder: str) -> list[str]:
    prefix = folder.removeprefix("s3://adapters/") + "/"
    found = s3.client.list_multipart_uploads(Bucket="adapters").get("Uploads", [])
    return [one["Key"].removeprefix(prefix) for one in found if one["Key"].startswith(prefix)]


class DeadlyPath(type(Path())):  # type: ignore[misc]
    """Whoever reads the file is killed when it wants its second part: each is opened on its own."""

    opened = 0

    def open(self, *arguments: Any, **more: Any) -> Any:
        DeadlyPath.opened += more.get("buffering") == 0  # as a part is, not as its digest is taken
        if DeadlyPath.opened > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open(*arguments, **more)


def test_an_adapter_whose_uploader_is_killed_after_one_of_three_parts_is_not_there_and_the_next_upload_cleans_up(
    local_s3: Storage, folder: str, tmp_path: Path
) -> None:
    weights = save_weights(TENSORS, tmp_path)
    child = os.fork()
    if child == 0:
        try:
            publish(store_of(local_s3), folder, DeadlyPath(weights))
        finally:
            os._exit(0)  # or an error would have it go on with the other tests
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    store = store_of(local_s3)
    assert find_published(store, folder) is None
    assert store.list(folder, MOST_LISTED) == [f"{folder}/{MARK_NAME}"], (
        "and that says whose files may lie there"
    )
    assert unfinished(local_s3, folder) == [WEIGHTS_NAME]
    publish(store, folder, weights)
    manifest = find_published(store, folder)
    assert manifest is not None
    assert store.read(f"{folder}/{WEIGHTS_NAME}", MOST) == weights.read_bytes()
    assert unfinished(local_s3, folder) == []


def test_who_lists_and_reads_all_the_time_never_sees_a_manifest_without_its_files(
    local_s3: Storage, folder: str, tmp_path: Path
) -> None:
    files = {f"{folder}/{name}" for name in (WEIGHTS_NAME, CONFIG_NAME, CARD_NAME)}
    manifest_uri = f"{folder}/{MANIFEST_NAME}"
    done, listings, compared = threading.Event(), list[bool](), list[int]()

    def poll() -> None:
        store = store_of(local_s3)
        while not done.is_set():
            listed = set(store.list(folder, MOST_LISTED))
            if manifest_uri in listed:
                listings.append(files <= listed)
            try:
                before = store.read(manifest_uri, MOST)
                weights = store.read(f"{folder}/{WEIGHTS_NAME}", MOST)
                unchanged = store.read(manifest_uri, MOST) == before
            except ObjectNotFound:
                continue
            if unchanged:
                manifest = AdapterManifest.model_validate_json(before)
                [file] = [one for one in manifest.files if one.name == WEIGHTS_NAME]
                assert hashlib.sha256(weights).hexdigest() == file.sha256
                compared.append(manifest.step)

    store = store_of(local_s3)
    with ThreadPoolExecutor(2) as pool:
        polling = [pool.submit(poll) for _ in range(2)]
        for step in range(1, 6):
            tensors = {**TENSORS, "q.lora_B.weight": torch.full((4, 11), float(step))}
            publish(store, folder, save_weights(tensors, tmp_path), step)
        while 5 not in compared and all(not one.done() for one in polling):
            pass
        done.set()
        for one in polling:
            one.result()
    assert listings
    assert all(listings)


class LossyProxy(ThreadingHTTPServer):
    """Passes all on to a real store; the reply to the first completion of an upload is lost on the way back."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = target.removeprefix("http://")
        self.lost = 0
        self.completions: list[int] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LossyProxy

    def log_message(self, *_: object) -> None: ...

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        connection = http.client.HTTPConnection(self.server.target)
        # The signature is over the Host that the client knows.
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        if self.command == "POST" and "uploadId=" in self.path:
            self.server.completions.append(answer.status)
            if not self.server.lost:
                self.server.lost = 1
                self.close_connection = True
                self.connection.close()
                return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle


def test_a_completion_whose_reply_was_lost_is_looked_for_and_not_failed(
    local_s3: Storage, folder: str, tmp_path: Path
) -> None:
    weights = save_weights(TENSORS, tmp_path)
    with LossyProxy(local_s3.endpoint) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            publish(store_of(local_s3, proxy.endpoint), folder, weights)
        finally:
            proxy.shutdown()
    assert proxy.lost == 1
    assert len(proxy.completions) == 2, "the client asked again"
    assert find_published(store_of(local_s3), folder) is not None
    assert unfinished(local_s3, folder) == []


# --- disks that are full ------------------------------------------------------------------------------------------


@contextmanager
def volume(folder: Path, size: int) -> Iterator[Path]:
    """A volume of ``size`` bytes of its own."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a volume of its own needs the right to mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def state(step: int, size: int) -> TaskState:
    progress = SavedProgress(
        step=step, total_steps=100, updates=step, epoch=0, epoch_step=step, learning_rate=0.1, last=None, tokens=1,
        seconds=1.0, task_uid="uid", task="n/a", fingerprint={},
    )  # fmt: skip
    return TaskState(progress, {"parameters.layers.0.lora_A": torch.full((size // 4,), float(step))})


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*") if path.is_file() and path.name.endswith(".partial")]


def test_a_checkpoint_on_a_full_volume_is_named_leaves_the_one_before_and_is_written_once_there_is_room(
    tmp_path: Path,
) -> None:
    store = FileStore()
    with volume(tmp_path / "small", 10 * MIB) as small:
        folder = file_uri(small / "checkpoints")
        write_checkpoint(store, folder, state(5, 3 * MIB), tmp_path)
        filler = small / "filler"
        filler.write_bytes(bytes(5 * MIB))
        with pytest.raises(StorageError, match="no space left on that volume") as caught:
            write_checkpoint(store, folder, state(10, 3 * MIB), tmp_path)
        assert caught.value.reason is FailureReason.INSUFFICIENT_SPACE
        assert leftovers(small) == []
        found = newest_state(store, folder)
        assert found is not None
        assert found.progress.step == 5
        filler.unlink()
        write_checkpoint(store, folder, state(10, 3 * MIB), tmp_path)
        assert newest_progress(store, folder) == state(10, 0).progress


def test_where_only_two_checkpoints_fit_the_oldest_makes_room_for_the_newest(tmp_path: Path) -> None:
    store = FileStore()
    with volume(tmp_path / "small", 10 * MIB) as small:
        folder = file_uri(small / "checkpoints")
        for step in (5, 10):
            write_checkpoint(store, folder, state(step, 4 * MIB), tmp_path)
        with pytest.raises(StorageError, match="no space left"):
            write_checkpoint(store, folder, state(15, 4 * MIB), tmp_path)
        assert newest_progress(store, folder) == state(10, 0).progress
        write_checkpoint(store, folder, state(15, 4 * MIB), tmp_path)
        found = newest_state(store, folder)
        assert found is not None
        assert found.progress.step == 15
        assert torch.equal(found.tensors["parameters.layers.0.lora_A"], torch.full((MIB,), 15.0))


def test_an_adapter_that_the_ranks_volume_cannot_keep_is_uploaded_all_the_same(
    local_s3: Storage, folder: str, tmp_path: Path
) -> None:
    finished = FinishedAdapter(TENSORS, {}, 1, 1.0, None)
    with volume(tmp_path / "small", 8 * MIB) as small:
        kept = LocalSpool(small / "kept")
        with kept.weights("uid", "print", finished) as path:
            assert path.is_relative_to(tempfile.gettempdir())
            assert not path.is_relative_to(small)
            publish(store_of(local_s3), folder, path)
        assert kept.adapter("uid", "print") is None
        assert sum(one.stat().st_size for one in small.rglob("*") if one.is_file()) < MIB, (
            "no half of it stays"
        )
    assert find_published(store_of(local_s3), folder) is not None


def test_a_published_folder_on_a_full_volume_is_no_adapter(tmp_path: Path) -> None:
    weights = save_weights(TENSORS, tmp_path)
    with volume(tmp_path / "small", 10 * MIB) as small:
        output = file_uri(small / "out")
        with pytest.raises(StorageError, match="no space left") as caught:
            publish(FileStore(), output, weights)
        assert caught.value.reason is FailureReason.INSUFFICIENT_SPACE
        assert find_published(FileStore(), output) is None
        assert [path.name for path in small.rglob("*") if path.is_file()] == [MARK_NAME]


def test_a_task_that_would_not_fit_is_refused_before_it_trains(tmp_path: Path) -> None:
    facts = ModelFacts(
        hidden_size=1024, intermediate_size=1024, layers=8, attention_heads=4, vocab_size=99, max_positions=64,
        dtype_bytes=4, modules=(
            ModuleShape(
                stage=0, name="q_proj", path="layers.*.q_proj", in_features=1024, out_features=1024, count=8
            ),
        ),
    )  # fmt: skip
    with volume(tmp_path / "small", 4 * MIB) as small:
        plan = task(file_uri(small / "out"))
        checkpoints = f"{plan.output_uri}/checkpoints"
        with pytest.raises(
            StorageError, match=r"has 4\.0 MiB free, and the task needs 5\.0 MiB there"
        ) as caught:
            check_disk_space(
                plan, targets_of(facts, plan.lora), checkpoints=checkpoints, scratch=lambda _: tmp_path
            )
        assert caught.value.reason is FailureReason.INSUFFICIENT_SPACE
        smaller = targets_of(facts, plan.lora.model_copy(update={"rank": 6}))
        check_disk_space(plan, smaller, checkpoints=checkpoints, scratch=lambda _: tmp_path)
