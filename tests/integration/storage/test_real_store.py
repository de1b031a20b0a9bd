"""Storage against a real S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pydantic import SecretStr
from safetensors.torch import load_file

from mlora_worker.data.prepare import prepare
from mlora_worker.data.tokenizing.tokenizer import load_tokenizer
from mlora_worker.protocol import (
    MANIFEST_NAME,
    Dataset,
    DatasetFormat,
    FailureReason,
    LoRAConfig,
    ModelSource,
    StorageAccess,
    TaskPlan,
    Training,
)
from mlora_worker.storage.artifacts.adapter import (
    adapter_config,
    find_published,
    publish_adapter,
    save_weights,
)
from mlora_worker.storage.artifacts.write_probe import probe_output
from mlora_worker.storage.base_model.model_source import ModelFiles
from mlora_worker.storage.errors import AccessRefused, ObjectNotFound, StorageError
from mlora_worker.storage.limits import MOST_LISTED
from mlora_worker.storage.object_store.s3 import PIECE, Keys, S3Store
from mlora_worker.storage.object_store.store import Store, open_store, open_store_from_files
from mlora_worker.storage.remote.dataset_source import open_sources
from mlora_worker.storage.remote.line_splitter import split_lines
from tests.fixtures.storage import Storage

MOST = 2**30  # bytes

pytestmark = pytest.mark.integration

MIB = 2**20


def access_to(s3: Storage, *, secret_key: str | None = None, access_key: str | None = None) -> StorageAccess:
    return StorageAccess(
        endpoint=s3.endpoint,
        region=s3.region,
        access_key=SecretStr((access_key or s3.access_key) + "\n"),
        secret_key=SecretStr(secret_key or s3.secret_key),
    )


@pytest.fixture
def store(local_s3: Storage) -> Store:
    return open_store(access_to(local_s3), allow_files=False, allowed_networks=("127.0.0.0/8",))


@pytest.fixture
def folder() -> str:
    """A folder of its own for each test."""
    return f"s3://adapters/{uuid.uuid4().hex}"


def unfinished(s3: Storage, folder: str) -> list[str]:
    found = s3.client.list_multipart_uploads(Bucket="adapters").get("Uploads", [])
    prefix = folder.removeprefix("s3://adapters/")
    return [upload["Key"].removeprefix(prefix + "/") for upload in found if upload["Key"].startswith(prefix)]


def test_what_was_written_is_read_listed_and_deleted(store: Store, folder: str) -> None:
    odd = f"{folder}/a b/100% ü?x#y+z"
    store.write(odd, b"content")
    store.write(f"{folder}2/other", b"")
    assert store.read(odd, MOST) == b"content"
    assert store.read_range(odd, 3, 2) == b"te"
    assert store.list(folder, MOST_LISTED) == store.list(folder + "/", MOST_LISTED) == [odd]
    store.delete(odd)
    store.delete(odd)
    assert not store.exists(odd)
    assert store.list(folder, MOST_LISTED) == []
    assert list(store.pieces(f"{folder}2/other")) == []


def test_lines_of_a_large_object_are_whole_across_the_pieces(store: Store, folder: str) -> None:
    lines = [b"%07d " % number + b"x" * (number % 3000) for number in range(9000)]
    content = b"\n".join(lines)
    assert len(content) > PIECE
    store.write(f"{folder}/rows", content)
    assert list(split_lines(store.pieces(f"{folder}/rows"))) == lines


def test_a_range_beyond_the_end_is_an_error(store: Store, folder: str) -> None:
    store.write(f"{folder}/x", b"12345")
    with pytest.raises(StorageError, match="shorter than expected"):
        store.read_range(f"{folder}/x", 3, 10)


KILLED_UPLOADER = """
import json, os, signal, sys
from pathlib import Path
from mlora_worker.storage.object_store.s3 import Keys, S3Store

class DeadlyPath(type(Path())):
    opened = 0
    def open(self, *arguments, **more):
        DeadlyPath.opened += more.get("buffering") == 0  # once for each part
        if DeadlyPath.opened == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open(*arguments, **more)

endpoint, region, access_key, secret_key, uri, path = json.load(sys.stdin)
store = S3Store(endpoint=endpoint, region=region, keys=lambda: Keys(access_key, secret_key), part=5 * 2**20)
store.write_file(uri, DeadlyPath(path))
"""


def test_an_uploader_killed_after_two_of_three_parts_leaves_no_object_and_the_next_one_cleans_up(
    local_s3: Storage, folder: str, tmp_path: Path
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (11 * MIB // 256))
    s3, uri = local_s3, f"{folder}/weights"
    arguments = json.dumps([s3.endpoint, s3.region, s3.access_key, s3.secret_key, uri, str(path)])
    killed = subprocess.run([sys.executable, "-c", KILLED_UPLOADER], input=arguments, text=True, check=False)
    assert killed.returncode == -9
    store = S3Store(
        endpoint=s3.endpoint, region=s3.region, keys=lambda: Keys(s3.access_key, s3.secret_key), part=5 * MIB
    )
    assert not store.exists(uri)
    assert unfinished(s3, folder) == ["weights"]
    neighbour = f"{folder.removeprefix('s3://adapters/')}/weights-of-another"
    s3.client.create_multipart_upload(Bucket="adapters", Key=neighbour)
    store.write_file(uri, path)
    assert store.read(uri, MOST) == path.read_bytes()
    assert unfinished(s3, folder) == ["weights-of-another"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"secret_key": "wrong"}, "the secret key is wrong"),
        ({"access_key": "nobody"}, "does not know the access key"),
    ],
)
def test_wrong_keys_are_told_apart_and_never_quoted(
    local_s3: Storage, folder: str, change: dict[str, str], told: str
) -> None:
    wrong = open_store(access_to(local_s3, **change), allow_files=False, allowed_networks=("127.0.0.0/8",))
    with pytest.raises(AccessRefused, match=told) as caught:
        probe_output(wrong, folder)
    assert local_s3.access_key not in str(caught.value)
    assert local_s3.secret_key not in str(caught.value)


def test_a_missing_object_and_a_missing_bucket_are_told_apart(store: Store, folder: str) -> None:
    with pytest.raises(ObjectNotFound, match=r"rows.jsonl does not exist") as caught:
        list(store.pieces(f"{folder}/rows.jsonl"))
    assert caught.value.reason is FailureReason.DATASET_NOT_FOUND
    with pytest.raises(ObjectNotFound, match="bucket no-such-bucket of"):
        store.read(
            "s3://no-such-bucket/x", 1000
        )  # of larger ones the size is asked first, and that answer has no words
    with pytest.raises(StorageError, match="bucket no-such-bucket of") as probe:
        probe_output(store, "s3://no-such-bucket/x")
    assert probe.value.reason is FailureReason.UPLOAD_FAILED


def test_a_probe_leaves_nothing_behind(store: Store, folder: str) -> None:
    probe_output(store, folder)
    assert store.list(folder, MOST_LISTED) == []


def test_a_reader_that_follows_the_manifest_never_sees_half_an_adapter(
    store: Store, folder: str, tmp_path: Path
) -> None:
    task = TaskPlan(
        uid="uid",
        namespace="team-a",
        name="bot",
        base_model="acme/tiny",
        lora=LoRAConfig(),
        dataset=Dataset(uri="s3://data/rows.jsonl"),
        training=Training(),
        output_uri=folder,
    )
    config = adapter_config(task.lora, task.base_model, None, ["q_proj"])
    done = threading.Event()
    seen: list[bool] = []

    def poll() -> None:
        while not done.is_set():
            if store.exists(f"{folder}/{MANIFEST_NAME}"):
                manifest = find_published(store, folder)
                # None: it was withdrawn between the two questions, which is never half of one.
                seen.append(manifest is None or len(manifest.files) == 3)

    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll)
        for size in (1, 2, 3, 4):
            tensors = {
                "q_proj.lora_A.weight": torch.ones(size, 2**18),
                "q_proj.lora_B.weight": torch.ones(9, size),
            }
            weights = save_weights(tensors, tmp_path)
            publish_adapter(store, folder, weights, config, task=task, step=size, loss=1.0, data=None)
            manifest = find_published(store, folder)
            assert manifest is not None
            assert manifest.step == size
        done.set()
        polling.result()
    assert seen
    assert all(seen)
    assert len(store.list(folder, MOST_LISTED)) == 4


def upload(store: Store, local: Path, uri: str) -> None:
    for path in local.iterdir():
        store.write_file(f"{uri}/{path.name}", path)


def test_a_model_is_read_by_name_and_its_tokenizer_prepares_rows(
    local_s3: Storage, store: Store, folder: str, tiny_model: Path, tmp_path: Path
) -> None:
    upload(store, tiny_model, folder)
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "AWS_ACCESS_KEY_ID").write_text(local_s3.access_key + "\n")
    (keys / "AWS_SECRET_ACCESS_KEY").write_text(local_s3.secret_key + "\n")
    mounted = open_store_from_files(local_s3.endpoint, local_s3.region, keys, allow_files=False)

    def one_rank(_: int) -> Path:
        return ModelFiles(mounted, ModelSource(name="acme/tiny", uri=folder), tmp_path / "cache").folder()

    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(one_rank, range(4)))
    assert len(folders) == 1
    files = ModelFiles(mounted, ModelSource(name="acme/tiny", uri=folder), tmp_path / "cache")
    expected = load_file(tiny_model / "model.safetensors")
    assert files.names() == set(expected)
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in expected.items())

    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    store.write(f"{folder}/rows.jsonl", json.dumps(row).encode())
    dataset = Dataset(uri=f"{folder}/rows.jsonl", format=DatasetFormat.MESSAGES)
    tokenizer = load_tokenizer(folders.pop())
    source = open_sources(store, StorageAccess())
    prepared = prepare(dataset, Training(max_seq_length=64), tokenizer, source, 64)
    assert "hello" in tokenizer.decode(prepared.rows[0].labels[prepared.rows[0].labels >= 0])
