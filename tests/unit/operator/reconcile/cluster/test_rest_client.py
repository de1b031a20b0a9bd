"""Answers of the API server, and of what stands before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlora_operator.reconcile.cluster.rest_client import ApiError, KubeApi


class Answering:
    """A client that always gets this answer."""

    def __init__(self, status: int, text: bytes) -> None:
        self.status, self.text = status, text

    async def param_serialize(self, *_: Any, **__: Any) -> tuple[()]:
        return ()

    async def call_api(self, *_: Any, **__: Any) -> Any:
        async def read() -> bytes:
            return self.text

        return SimpleNamespace(status=self.status, reason="Not Found", read=read)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"404 page not found\n", "404: 404 page not found"),
        (b"<html>" + b"x" * 100_000, "404: <html>" + "x" * 494),
        (b"", "404: Not Found"),
        (b"[1, 2]", "404: Not Found"),
        (b'{"message": {"a": 1}}', "404: Not Found"),
        (b'{"kind": "Status", "message": "loratasks \\"a\\" not found"}', '404: loratasks "a" not found'),
        (b"[" * 100_000, "404: " + "[" * 500),
    ],
)
async def test_a_refusal_that_is_no_status_is_a_refusal_all_the_same(text: bytes, words: str) -> None:
    """The CRD was removed: the server answers in plain text."""
    api = KubeApi(Answering(404, text))  # type: ignore[arg-type]
    with pytest.raises(ApiError) as refused:
        await api.get("/apis/mlora.dev/v1alpha1/namespaces/a/loratasks/b")
    assert str(refused.value) == words
    assert refused.value.status == 404
