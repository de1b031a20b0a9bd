"""`mlora sync` from a real S3 store: what is listed below a prefix, and what a store that refuses leaves as it is."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

import pytest

from mlora_operator.cli import exit_codes
from mlora_operator.cli.sync.command import main
from mlora_operator.download import Access, AdapterFolders, StoreRefused, open_source
from tests.fixtures.published import publish
from tests.fixtures.storage import Storage

pytestmark = pytest.mark.integration


@pytest.fixture
def prefix() -> str:
    return f"sync-{uuid.uuid4().hex[:8]}"


@pytest.fixture(autouse=True)
def environment(local_s3: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", local_s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", local_s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", local_s3.secret_key)
    monkeypatch.setenv("AWS_REGION", local_s3.region)


def upload(s3: Storage, folder: Path, key: str) -> None:
    for path in sorted(folder.iterdir()):
        s3.client.upload_file(str(path), "adapters", f"{key}/{path.name}")


def source(uri: str, secret_key: str | None = None) -> AdapterFolders:
    keys = (
        {}
        if secret_key is None
        else {"access_key": os.environ["AWS_ACCESS_KEY_ID"], "secret_key": secret_key}
    )
    return open_source(uri, Access(**keys))


def test_folders_directly_below_a_prefix_are_listed(local_s3: Storage, prefix: str) -> None:
    names = [f"bot-{n:04}" for n in range(1005)]  # more than one page
    for name in names:
        local_s3.client.put_object(
            Bucket="adapters", Key=f"{prefix}/{name}/checkpoints/step-1/manifest.json", Body=b""
        )
    local_s3.client.put_object(Bucket="adapters", Key=f"{prefix}/file", Body=b"")
    assert sorted(source(f"s3://adapters/{prefix}/").names()) == names
    assert list(source(f"s3://adapters/{prefix}-not-there").names()) == []


@pytest.mark.parametrize("uri", ["s3://not-there/p", "s3://not-there"])
def test_a_bucket_that_is_not_there_is_no_empty_one(uri: str) -> None:
    with pytest.raises(StoreRefused, match="is not in the store"):
        list(source(uri).names())


def test_wrong_keys_remove_nothing(
    local_s3: Storage, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreRefused, match="SignatureDoesNotMatch"):
        list(source(f"s3://adapters/{prefix}", "wrong").names())
    upload(local_s3, publish(tmp_path / "bot"), f"{prefix}/bot")
    arguments = [f"s3://adapters/{prefix}", "-d", str(tmp_path / "shown"), "--once", "--prune"]
    assert main(arguments) == 0
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert main(arguments) == exit_codes.UNREACHABLE
    assert (tmp_path / "shown" / "bot" / "manifest.json").exists()


def test_an_adapter_comes_from_a_store_is_replaced_and_goes(
    local_s3: Storage, prefix: str, tmp_path: Path
) -> None:
    arguments = [f"s3://adapters/{prefix}", "-d", str(tmp_path / "shown"), "--once", "--prune"]
    weights = tmp_path / "shown" / "bot" / "adapter_model.safetensors"
    assert main(arguments) == 0
    assert not weights.exists()
    for content in (b"first", b"second"):
        upload(local_s3, publish(tmp_path / "bot", content), f"{prefix}/bot")
        assert main(arguments) == 0
        assert weights.read_bytes() == content
    for key in local_s3.keys("adapters", f"{prefix}/bot/"):
        local_s3.client.delete_object(Bucket="adapters", Key=key)
    assert main(arguments) == 0
    assert not weights.exists()
    shutil.rmtree(tmp_path / "shown")
