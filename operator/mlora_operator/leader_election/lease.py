"""The lease of the leader as an object of the API server (``coordination.k8s.io/v1``)."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from mlora_operator.api.paths import item
from mlora_operator.leader_election.elector import Lease, Overtaken
from mlora_operator.reconcile.cluster.rest_client import ApiError, KubeApi

API_VERSION = "coordination.k8s.io/v1"
POD_NAME_VARIABLE = "MLORA_POD_NAME"


def own_identity(environment: Mapping[str, str]) -> str:
    """The pod's name, which a process that the kubelet started again in the same pod has too, so that it goes on at once
    with the lease of the one before. Outside of a pod a name that nobody had yet."""
    pod = environment.get(POD_NAME_VARIABLE)
    return pod or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class ApiLeases:
    """``leader.LeaseStore``. ``now`` is only for people who look at the object."""

    def __init__(self, api: KubeApi, namespace: str, name: str, now: Callable[[], datetime]) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._now = now

    async def read(self) -> Lease | None:
        try:
            return _lease(await self._api.get(self._path))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def write(self, former: Lease | None, holder: str, duration: float) -> Lease:
        new_holder = former is None or (holder not in ("", former.holder))
        now = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": round(duration),
            "renewTime": now,
        }
        if new_holder:
            spec |= {"acquireTime": now, "leaseTransitions": former.transitions + 1 if former else 0}
        metadata = {"namespace": self._namespace, "name": self._name}
        manifest = {"apiVersion": API_VERSION, "kind": "Lease", "metadata": metadata, "spec": spec}
        try:
            if former is None:
                return _lease(await self._api.create(manifest))
            metadata["resourceVersion"] = former.version  # the server refuses (409) when it is another by now
            return _lease(await self._api.merge(self._path, {"metadata": metadata, "spec": spec}))
        except ApiError as error:
            if error.status in (404, 409):
                raise Overtaken(str(error)) from error
            raise

    @property
    def _path(self) -> str:
        return item(API_VERSION, "leases", self._namespace, self._name)


def _lease(found: Mapping[str, Any]) -> Lease:
    spec = found.get("spec") or {}
    return Lease(
        holder=spec.get("holderIdentity") or "",
        duration=float(spec.get("leaseDurationSeconds") or 0),
        transitions=int(spec.get("leaseTransitions") or 0),
        version=found["metadata"]["resourceVersion"],
    )
