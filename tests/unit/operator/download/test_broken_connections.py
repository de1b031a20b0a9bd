"""A store whose answer breaks off is silent, wherever the SDK was at that moment: never the folder's fault."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from urllib3.exceptions import ProtocolError

from mlora_operator.download import Access, AdapterSource, StoreSilent, open_source
from tests.fixtures.served import served


class Breaking(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"{")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Breaking]:
    with served(Breaking()) as made:
        yield made


def source_at(server: Breaking) -> AdapterSource:
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    return open_source("s3://bucket/adapter", Access(endpoint=endpoint, access_key="k", secret_key="s"))


def test_an_answer_that_breaks_off_may_come_whole_the_next_time(server: Breaking) -> None:
    with pytest.raises(StoreSilent, match="does not answer"):
        list(source_at(server).read("manifest.json"))


@pytest.mark.parametrize(
    "broken", [ConnectionResetError(104, "reset"), BrokenPipeError(), ProtocolError("Connection broken")]
)
def test_so_does_one_that_the_sdk_lets_through(server: Breaking, broken: Exception) -> None:
    source: Any = source_at(server)

    class Client:
        def get_object(self, **_: Any) -> Any:
            raise broken

    source._client = Client()
    with pytest.raises(StoreSilent, match="does not answer"):
        list(source.read("manifest.json"))
