"""What the benchmarks of the operator's process stand on: a namespace of their own, and coordinators that only speak."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from bench.operator_parts.server import Server

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def coordinators(capacity: int) -> Iterator[str]:
    """The setting ``coordinatorUrl`` that leads to them. ``capacity``: bytes of a stage."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.operator_parts.coordinator", str(capacity)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        yield f"http://127.0.0.1:{port}/{{namespace}}/{{name}}"
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def own_namespace(server: Server, prefix: str) -> AsyncIterator[str]:
    """A new one, deleted with all that is in it."""
    name = f"{prefix}-{secrets.token_hex(4)}"
    await server.create(
        "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    )
    try:
        yield name
    finally:
        await server.delete(f"/api/v1/namespaces/{name}")
