"""A connection that breaks is never a task's fault, wherever the SDK was at that moment."""

from __future__ import annotations

import pytest
from urllib3.exceptions import ProtocolError

from mlora_worker.protocol import StorageAccess
from mlora_worker.storage.errors import StoreUnreachable
from mlora_worker.storage.object_store.s3 import S3Store
from mlora_worker.storage.object_store.store import open_store


@pytest.mark.parametrize(
    "broken", [ProtocolError("Connection broken"), ConnectionResetError(104, "reset"), BrokenPipeError()]
)
def test_what_the_sdk_lets_through_of_a_broken_connection_is_an_unreachable_store(broken: Exception) -> None:
    access = StorageAccess.model_validate(
        {"endpoint": "http://127.0.0.1:9", "accessKey": "a", "secretKey": "b"}
    )
    store = open_store(access, allow_files=False, allowed_networks=("127.0.0.0/8",))._of("s3://b/k")  # type: ignore[attr-defined]
    assert isinstance(store, S3Store)
    with pytest.raises(StoreUnreachable, match="cannot read s3://b/k: the connection was lost"):
        with store._calling("read", "s3://b/k"):
            raise broken

    class Client:
        def get_object(self, **_: object) -> dict[str, object]:
            return {"Body": self}

        def read(self, _: int) -> bytes:
            raise broken

        def close(self) -> None: ...

    store._client = lambda _: Client()  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachable, match="the connection was lost while reading"):
        store.read("s3://b/k", 10)
