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
from mlora_operator.manifests.names import SCHEME
from mlora_operator.manifests.owner import Owner
from mlora_operator.manifests.secret import CERTIFICATE_KEY, TOKEN_KEY
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
        self._secrets: dict[str, str] = {}  # values by key, as first read

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

    def coordinator(self) -> tuple[str, str, str | None] | None:
        """Its address, the token that it asks for, and the certificate that it has where it serves HTTPS."""
        token = self._held(self._pipeline.token_secret, TOKEN_KEY)
        pod = self._read(self.name(0))
        if pod is None or token is None or not pod.status.pod_ip:
            return None
        scheme = pod.metadata.annotations.get(SCHEME, "http")
        certificate = self._held(self._pipeline.tls_secret, CERTIFICATE_KEY) if scheme == "https" else None
        return f"{scheme}://{pod.status.pod_ip}:{HTTP_PORT}", token, certificate

    def _held(self, secret: str, key: str) -> str | None:
        """A value of a Secret that stays as it is."""
        if key not in self._secrets:
            read = self._core.read_namespaced_secret
            held = _if_there(lambda: read(secret, self._pipeline.namespace))
            if held is None:
                return None
            self._secrets[key] = base64.b64decode(held.data[key]).decode()
        return self._secrets[key]

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
