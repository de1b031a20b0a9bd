"""The pods of a namespace in which one release and one pipeline are, and the processes in them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from bench.chaos_parts.containers import first_process
from mlora_operator.manifests.owner import Owner
from mlora_operator.manifests.secret import TOKEN_KEY
from mlora_operator.manifests.worker import HTTP_PORT

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Running:
    """A pod whose program runs. ``pid``: as the machine counts."""

    name: str
    uid: str
    pid: int


class Pods:
    def __init__(self, api: client.ApiClient, pipeline: Owner) -> None:
        self._core, self._coordination = client.CoreV1Api(api), client.CoordinationV1Api(api)
        self._pipeline = pipeline
        self._token: str | None = None

    def name(self, rank: int) -> str:
        return f"{self._pipeline.child}-{rank}"

    def rank(self, rank: int) -> Running | None:
        """None between two starts."""
        return self._running(self.name(rank), "mlora_worker")

    def operator(self) -> Running | None:
        """The one that acts: it holds the Lease."""
        holder = self.lease().holder_identity
        return self._running(holder, "mlora_operator") if holder else None

    def is_wanted(self, uid: str) -> bool:
        """The pod is there, and nobody has asked it to end."""
        found = self._core.list_namespaced_pod(self._pipeline.namespace).items
        return any(one.metadata.uid == uid and one.metadata.deletion_timestamp is None for one in found)

    def lease(self) -> Any:
        """Spec of the operators' Lease."""
        [found] = self._coordination.list_namespaced_lease(self._pipeline.namespace).items
        return found.spec

    def renewed(self) -> datetime:
        """When an operator has last said that it acts."""
        time: datetime = self.lease().renew_time
        return time

    def coordinator(self) -> tuple[str, str] | None:
        """Its address, and the token that it asks for."""
        if self._token is None:
            held = _if_there(
                lambda: self._core.read_namespaced_secret(
                    self._pipeline.token_secret, self._pipeline.namespace
                )
            )
            self._token = base64.b64decode(held.data[TOKEN_KEY]).decode() if held is not None else None
        pod = self._read(self.name(0))
        if pod is None or self._token is None or not pod.status.pod_ip:
            return None
        return f"http://{pod.status.pod_ip}:{HTTP_PORT}", self._token

    def _running(self, name: str, program: str) -> Running | None:
        pod = self._read(name)
        pid = first_process(pod.metadata.uid, program) if pod is not None else None
        return Running(name, pod.metadata.uid, pid) if pod is not None and pid is not None else None

    def _read(self, name: str) -> Any:
        return _if_there(lambda: self._core.read_namespaced_pod(name, self._pipeline.namespace))


def _if_there(read: Callable[[], _Read]) -> _Read | None:
    try:
        return read()
    except ApiException as error:
        if error.status != 404:
            raise
        return None
