"""Groups of real ranks whose links are encrypted, or that have addresses of IPv6 alone, while strangers call."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlora_operator.certificates import self_signed
from mlora_worker.protocol import TaskPhase, TaskPlan
from tests.integration.worker.conftest import Group

pytestmark = pytest.mark.integration

MakeTask = Callable[..., TaskPlan]
StartGroup = Callable[..., Group]


def weights_of(task: TaskPlan) -> dict[str, torch.Tensor]:
    return load_file(Path(task.output_uri.removeprefix("file://")) / "adapter_model.safetensors")


@contextlib.contextmanager
def strangers(host: str, port: int) -> Iterator[list[int]]:
    """They call all the time and say what they like; counted."""
    done, calls = threading.Event(), [0]
    header = b'{"rank":1,"version":1,"token":"\\ud800"}'
    words = [b"", b"m", struct.pack("!IQ", len(header), 0) + header, b"\x16\x03\x01\x02\x00\x01"]

    def call() -> None:
        held: list[socket.socket] = []
        while not done.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((host, port), timeout=2))
                held[-1].sendall(words[calls[0] % len(words)])
                calls[0] += 1
            if len(held) > 20:
                held.pop(0).close()
            time.sleep(0.05)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        yield calls
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("way", ["encrypted", "IPv6"])
def test_a_group_trains_the_same_whatever_its_links_are_and_whoever_calls(
    way: str,
    start_group: StartGroup,
    request: pytest.FixtureRequest,
    make_task: MakeTask,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    if way == "encrypted":
        pair = self_signed("localhost", datetime.now(UTC))
        (tmp_path / "tls.crt").write_text(pair.certificate)
        (tmp_path / "tls.key").write_text(pair.key)
        options = {"coordinator_host": "localhost", "tls_dir": str(tmp_path)}
    else:
        options = {"coordinator_host": "::1"}
    group = start_group(tiny_model, stages=2, microbatch_tokens=16_384, **options)
    with strangers(group.config.coordinator_host, group.config.link_port) as calls:
        task = make_task("here", uid=f"here-{way}")
        report = group.finish(task)["here"]
        assert report.phase is TaskPhase.SUCCEEDED, report.failure
    group.stop()
    two_stages: Group = request.getfixturevalue("two_stages")
    plain = make_task("here", uid=f"there-{way}", outputUri=f"file://{tmp_path}/there")
    assert two_stages.finish(plain)["here"].phase is TaskPhase.SUCCEEDED
    here, there = weights_of(task), weights_of(plain)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[key], there[key]) for key in here)
    assert calls[0] > 10
    assert "connections to the link port were rejected" in group.logs()
