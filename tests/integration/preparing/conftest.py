"""A preparation process for a tiny tokenizer, and a web server whose answers a test holds back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlora_worker.preparing.client import RowProcess
from mlora_worker.preparing.messages import Setup
from mlora_worker.protocol import LoRAConfig, ModelSource, StorageAccess, TaskPlan, Training, WorkerConfig
from tests.fixtures.served import served
from tests.fixtures.tiny_model import byte_level_tokenizer
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

POSITIONS, VOCABULARY = 2048, 300
SECRET = "a-key-that-nobody-sees"
ROWS = "".join(json.dumps({"prompt": f"{n}?", "completion": f"answer {n}"}) + "\n" for n in range(40))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer(vocabulary=VOCABULARY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def setup(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    config = WorkerConfig(
        pipeline="n/p",
        model=ModelSource(name="m", uri=tokenizer_folder.as_uri()),
        stages=1,
        coordinator_host="127.0.0.1",
        token_file="/dev/null",
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        allow_file_uris=True,
        allowed_networks=("127.0.0.0/8",),
    )
    return Setup(config=config, folder=str(tokenizer_folder), max_positions=POSITIONS, vocabulary=VOCABULARY)


@pytest.fixture(scope="session")
def shared(setup: Setup) -> Iterator[RowProcess]:
    """For tests that leave it as it is."""
    rows = RowProcess().start()
    rows.set_up(setup)
    yield rows
    rows.close()


@pytest.fixture
def cache(setup: Setup) -> Path:
    return Path(setup.config.cache_dir) / "rows"


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., TaskPlan]:
    """``rows``: of its file."""

    def make(name: str = "a", rows: str = ROWS, **changes: Any) -> TaskPlan:
        file = tmp_path / f"{name}.jsonl"
        file.write_text(rows)
        plan = {
            "uid": name,
            "namespace": "n",
            "name": name,
            "base_model": "m",
            "lora": LoRAConfig(),
            "dataset": {"uri": file.as_uri()},
            "training": Training(batch_size=4),
            "output_uri": "s3://b/p",
            "storage": StorageAccess.model_validate({"accessKey": SECRET, "secretKey": SECRET}),
        }
        return TaskPlan.model_validate(plan | changes)

    return make


@dataclass
class SlowServer:
    """Sends the first half of ``ROWS``, and the rest once ``go_on`` is set. It names no version of what it has."""

    url: str = ""
    asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go_on: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def slow_server() -> Iterator[SlowServer]:
    slow = SlowServer()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(ROWS)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            half = len(ROWS) // 2
            self.wfile.write(ROWS[:half].encode())
            self.wfile.flush()
            slow.asked.release()
            slow.go_on.wait(60)
            self.wfile.write(ROWS[half:].encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with served(server):
        slow.url = f"http://127.0.0.1:{server.server_port}/rows.jsonl"
        try:
            yield slow
        finally:
            slow.go_on.set()


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return tiny_tokenizer
