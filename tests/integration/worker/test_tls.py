"""The operator's links to coordinators that serve HTTPS: real handshakes on loopback."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from mlora_operator.certificates import LIFETIME, self_signed
from mlora_operator.coordinator import CoordinatorClient, Links, Starting, Unreachable, Untrusted, reading
from mlora_operator.manifests.secret import CertificatePair
from mlora_operator.reconcile.ports import CoordinatorTrust, Endpoint
from mlora_operator.reconcile.state.snapshot import Key
from mlora_worker.coordinator.http.server import coordinator_app
from mlora_worker.coordinator.service import Coordinator
from mlora_worker.protocol import ModelSource, Plan, Report, WorkerConfig
from mlora_worker.runtime.tls import server_context

pytestmark = pytest.mark.integration

HOST = "mlora-toy-0.mlora-toy.team-a.svc"
TOY = Key("team-a", "toy")
NOW = datetime.now(UTC)


class Plans:
    """As much of a coordinator as is asked here."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def set_plan(self, plan: Plan, unsupported: object = None) -> bool:
        del unsupported
        self.taken.append(plan.generation)
        return True

    def wait_report(self, after: int, wait: float) -> Report:
        del after, wait
        return Report(run_id="run", sequence=1, plan_generation=0, ready=True)


def put(folder: Path, pair: CertificatePair) -> None:
    """As the kubelet does: both files at once, behind a link."""
    version = folder / f"..{len(list(folder.iterdir()))}"
    version.mkdir()
    (version / "tls.crt").write_text(pair.certificate)
    (version / "tls.key").write_text(pair.key)
    new = folder / "..new"
    new.symlink_to(version.name)
    new.rename(folder / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


@asynccontextmanager
async def served(plans: Plans, tls: ssl.SSLContext | None, token: str = "hush") -> AsyncIterator[str]:
    """The address, without a scheme, of the worker's own application."""
    runner = web.AppRunner(coordinator_app(lambda: cast(Coordinator, plans), lambda: token))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield f"://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def trust(pair: CertificatePair) -> CoordinatorTrust:
    return CoordinatorTrust(HOST, pair.certificate, "Secret team-a/mlora-toy-tls")


async def test_a_plan_arrives_by_the_certificate_that_the_operator_made(tmp_path: Path) -> None:
    pair, plans = self_signed(HOST, NOW), Plans()
    put(tmp_path, pair)
    async with served(plans, server_context(tmp_path, HOST)) as place, aiohttp.ClientSession() as session:
        client = CoordinatorClient(session, Endpoint(f"https{place}", "hush", trust(pair)))
        await client.put_plan(Plan(generation=1))
        assert (await client.poll_report()).run_id == "run"
    assert plans.taken == [1]


@asynccontextmanager
async def impostor(tls: ssl.SSLContext | None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Somebody in the coordinator's place: the address, and what was said to them."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1000))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard


@pytest.mark.parametrize(
    ("story", "of_theirs", "words"),
    [
        ("another key", self_signed(HOST, NOW), "self-signed certificate"),
        ("a certificate of another name", self_signed("another.svc", NOW), "self-signed certificate"),
    ],
)
async def test_whoever_has_another_certificate_is_sent_nothing(
    tmp_path: Path, story: str, of_theirs: CertificatePair, words: str
) -> None:
    put(tmp_path, of_theirs)
    async with impostor(server_context(tmp_path, HOST)) as (url, heard), aiohttp.ClientSession() as session:
        client = CoordinatorClient(session, Endpoint(url, "hush", trust(self_signed(HOST, NOW))))
        with pytest.raises(Untrusted, match="Secret team-a/mlora-toy-tls") as refused:
            await client.put_plan(Plan(generation=1))
        await asyncio.sleep(0.05)
    assert words in str(refused.value), story
    assert heard == [], story


async def test_whoever_does_not_encrypt_is_sent_nothing() -> None:
    """A link never falls back to HTTP by itself: it says hello in TLS, and that is all."""
    async with impostor(None) as (url, heard), aiohttp.ClientSession() as session:
        client = CoordinatorClient(session, Endpoint(url, "hush", trust(self_signed(HOST, NOW))))
        with pytest.raises(Unreachable):
            await client.put_plan(Plan(generation=1))
        await asyncio.sleep(0.05)
    assert len(heard) == 1
    assert b"hush" not in heard[0]
    assert b"HTTP" not in heard[0]


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (self_signed(HOST, NOW - LIFETIME - timedelta(days=1)), "certificate has expired"),
        (self_signed("another.svc", NOW), "certificate is not valid for"),
    ],
)
async def test_the_own_certificate_is_of_its_name_and_time_alone(
    tmp_path: Path, pair: CertificatePair, words: str
) -> None:
    put(tmp_path, pair)
    plans = Plans()
    async with served(plans, server_context(tmp_path, HOST)) as place, aiohttp.ClientSession() as session:
        client = CoordinatorClient(session, Endpoint(f"https{place}", "hush", trust(pair)))
        with pytest.raises(Untrusted, match=words):
            await client.put_plan(Plan(generation=1))
    assert plans.taken == []


@pytest.mark.parametrize("certificate", ["", "nonsense", "\u00e4", self_signed(HOST, NOW).key])
async def test_a_secret_without_a_certificate_is_said(tmp_path: Path, certificate: str) -> None:
    put(tmp_path, self_signed(HOST, NOW))
    broken = CoordinatorTrust(HOST, certificate, "Secret team-a/mlora-toy-tls")
    async with served(Plans(), server_context(tmp_path, HOST)) as place, aiohttp.ClientSession() as session:
        client = CoordinatorClient(session, Endpoint(f"https{place}", "hush", broken))
        with pytest.raises(Untrusted, match="Secret team-a/mlora-toy-tls has no certificate") as refused:
            await client.poll_report()
    assert "PRIVATE" not in str(refused.value)


async def test_without_a_certificate_to_trust_nobody_is_trusted(tmp_path: Path) -> None:
    put(tmp_path, self_signed(HOST, NOW))
    async with served(Plans(), server_context(tmp_path, HOST)) as place, aiohttp.ClientSession() as session:
        with pytest.raises(Untrusted):
            await CoordinatorClient(session, Endpoint(f"https{place}", "hush")).poll_report()


async def test_a_new_certificate_takes_over_without_a_gap_and_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both Secrets were deleted. The operator has the new token, then the new certificate, at once, and the coordinator has
    them when the kubelet has brought them."""
    monkeypatch.setattr(reading, "KEPT_SECONDS", 0.01)  # a certificate is looked at by each new connection
    former, new, plans = self_signed(HOST, NOW), self_signed(HOST, NOW), Plans()
    put(tmp_path, former)
    async with (
        served(plans, server_context(tmp_path, HOST)) as place,
        Links(lambda: None, lambda: NOW) as links,
    ):
        url = f"https{place}"

        async def send(generation: int) -> None:
            await links.send_plan(TOY, Plan(generation=generation))

        links.follow({TOY: Endpoint(url, "hush", trust(former))})
        await send(1)
        links.follow({TOY: Endpoint(url, "new token", trust(former))})
        await send(2)
        links.follow({TOY: Endpoint(url, "new token", trust(new))})
        await send(3)  # by the former certificate and the former token
        put(tmp_path, new)
        await asyncio.sleep(0.1)
        await send(4)
        put(tmp_path, former)
        await asyncio.sleep(0.1)
        with pytest.raises(Untrusted):  # it counts no longer
            await send(5)
    assert plans.taken == [1, 2, 3, 4]


async def test_files_that_are_broken_later_leave_the_former_ones_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair, plans = self_signed(HOST, NOW), Plans()
    put(tmp_path, pair)
    async with served(plans, server_context(tmp_path, HOST)) as place, aiohttp.ClientSession() as session:
        client = CoordinatorClient(session, Endpoint(f"https{place}", "hush", trust(pair)))
        put(tmp_path, CertificatePair("nonsense", "nonsense"))
        await client.put_plan(Plan(generation=1))
        await client.put_plan(Plan(generation=2))
        assert caplog.text.count("the previous certificate stays in use") == 1
    assert plans.taken == [1, 2]


async def test_workers_of_a_former_version_are_spoken_to_in_http_until_they_are_replaced(
    tmp_path: Path,
) -> None:
    """The pod says which it is. What was known of the coordinator at this address stays."""
    pair, plans = self_signed(HOST, NOW), Plans()
    put(tmp_path, pair)
    async with Links(lambda: None, lambda: NOW) as links:
        async with served(plans, None) as place:
            links.follow({TOY: Endpoint(f"http{place}", "hush", trust(pair))})
            await links.send_plan(TOY, Plan(generation=1))
        links.follow({TOY: Endpoint(f"https{place}", "hush", trust(pair))})
        assert links.contacts()[TOY].sent == Plan(generation=1)
        async with served(plans, server_context(tmp_path, HOST)) as new:
            links.follow({TOY: Endpoint(f"https{new}", "hush", trust(pair))})
            await links.send_plan(TOY, Plan(generation=2))
    assert plans.taken == [1, 2]


def rank(folder: Path, number: int, port: int) -> tuple[list[str], dict[str, str]]:
    """Command and environment of one rank of two, that waits for the other one."""
    (folder / "token").write_text("hush")
    config = WorkerConfig(
        pipeline="team-a/toy",
        model=ModelSource(name="m", uri="file:///nowhere"),
        stages=2,
        coordinator_host=HOST,
        http_port=port,
        link_port=0,
        token_file=str(folder / "token"),
        tls_dir=str(folder),
        device="cpu",
    )
    own = {"MLORA_WORKER_CONFIG": config.to_json(), "MLORA_POD_NAME": f"mlora-toy-{number}"}
    return [sys.executable, "-m", "mlora_worker"], os.environ | own


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_without_its_certificate_ends_and_says_why(
    tmp_path: Path, number: int, unused_tcp_port: int
) -> None:
    command, environment = rank(tmp_path, number, unused_tcp_port)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 1
    (line,) = [line for line in (ended.stdout + ended.stderr).splitlines() if "ERROR" in line]
    assert f"HTTPS cannot be served with {tmp_path}/tls.crt and tls.key: No such file or directory" in line


async def test_a_rank_with_a_certificate_serves_nothing_else(tmp_path: Path, unused_tcp_port: int) -> None:
    pair = self_signed(HOST, NOW)
    put(tmp_path, pair)
    command, environment = rank(tmp_path, 0, unused_tcp_port)
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=quiet, stderr=quiet)
    try:
        async with aiohttp.ClientSession() as session:
            place = f"127.0.0.1:{unused_tcp_port}"
            client = CoordinatorClient(session, Endpoint(f"https://{place}", "hush", trust(pair)))
            async with asyncio.timeout(180):
                while True:
                    try:
                        await client.poll_report()
                    except Starting:  # the other rank is missed
                        break
                    except Unreachable:
                        await asyncio.sleep(0.2)
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{place}/healthz")
            # As the kubelet asks, which gives no name and trusts anybody.
            async with session.get(f"https://{place}/healthz", ssl=False) as answer:
                assert answer.status == 200
    finally:
        process.kill()
        await process.wait()
