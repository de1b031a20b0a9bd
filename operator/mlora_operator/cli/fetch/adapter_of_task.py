"""Where a task's adapter lies, and the keys to it: what ``mlora fetch NAME`` asks the cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing

from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.cli import exit_codes
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.kube.client import JSON
from mlora_operator.cli.kube.cluster import KubeCluster, connect
from mlora_operator.cli.kube.retry import RetryTimeouts
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.submit.follow import follow
from mlora_operator.cli.task_table import row
from mlora_operator.download import Access
from mlora_operator.reconcile.state.references import ACCESS_KEY, CA_CERTIFICATE, SECRET_KEY, SESSION_TOKEN


def adapter_of_task(
    name: str,
    choice: ClusterChoice,
    endpoint: str | None,
    wait: bool,
    seconds: float | None,
    seen: Callable[[JSON], None] = lambda _: None,
) -> tuple[str, Access, str]:
    """Address, access and uid of a finished task's adapter. Raises CommandError, and what ``seen`` raises.

    ``seen`` is told of the task as it is at each change while it is waited for.
    """
    return asyncio.run(find_adapter(name, choice, endpoint, wait, seconds, seen))


async def find_adapter(
    name: str,
    choice: ClusterChoice,
    endpoint: str | None,
    wait: bool = False,
    seconds: float | None = None,
    seen: Callable[[JSON], None] = lambda _: None,
) -> tuple[str, Access, str]:
    """The same for who runs a loop already."""
    async with connect(choice) as cluster:
        if wait:
            try:
                async with asyncio.timeout(seconds):
                    found = await _finished(cluster, name, seen)
            except TimeoutError:
                message = f"loratask/{name} had not finished after {seconds:g} seconds"
                raise CommandError(message, exit_codes.TIMEOUT) from None
        else:
            found = await cluster.task(name)
        shown = row(found)
        if shown.failed:
            message = f"loratask/{name} failed: {shown.reason}: {shown.message}"
            raise CommandError(message, exit_codes.FAILED if wait else exit_codes.NOT_FOUND)
        if not shown.succeeded:
            state = found.get("status", {}).get("state", "not yet processed by the operator")
            raise CommandError(f"loratask/{name} has no adapter yet: it is {state}", exit_codes.NOT_FOUND)
        spec = spec_of(found)
        keys: Mapping[str, str] = {}
        if spec.storage.secret_ref is not None:
            keys = await cluster.secret(spec.storage.secret_ref.name)
    return shown.adapter or spec.output.uri, access_to(spec, keys, endpoint), found["metadata"]["uid"]


async def _finished(cluster: KubeCluster, name: str, seen: Callable[[JSON], None]) -> JSON:
    tasks = follow(cluster, cluster.namespace, name, RetryTimeouts(), time.monotonic, asyncio.sleep)
    async with aclosing(tasks):
        async for known in tasks:
            if name not in known:
                message = f"no loratask {name!r} in namespace {cluster.namespace!r}"
                raise CommandError(message, exit_codes.NOT_FOUND)
            seen(known[name])
            if row(known[name]).finished:
                return known[name]
    raise AssertionError("follow() never ends by itself")


def spec_of(found: JSON) -> LoRATaskSpec:
    """Without the fields that a cluster's CRD has filled in and only newer programs know."""
    return LoRATaskSpec.model_validate(found["spec"], extra="ignore")


def access_to(spec: LoRATaskSpec, keys: Mapping[str, str], endpoint: str | None) -> Access:
    """How to reach a task's store with its Secret's keys. Raises CommandError when a key is missing."""
    names = (ACCESS_KEY, SECRET_KEY)
    if spec.storage.secret_ref is not None:
        for name in names:
            if not keys.get(name, "").strip():
                message = f"secret/{spec.storage.secret_ref.name} has no {name}"
                raise CommandError(message, exit_codes.UNREACHABLE)
    return Access(
        endpoint=endpoint or spec.storage.endpoint,
        region=spec.storage.region,
        access_key=keys[names[0]].strip() if keys else None,
        secret_key=keys[names[1]].strip() if keys else None,
        session_token=keys.get(SESSION_TOKEN, "").strip() or None,
        anonymous=not keys,
        addressing=spec.storage.addressing.value,
        ca_certificate=keys.get(CA_CERTIFICATE, "").strip() or None,
    )
