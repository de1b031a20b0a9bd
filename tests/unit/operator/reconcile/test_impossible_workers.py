"""A pipeline that the API server takes, and of which no workers can be made, stops nobody else's work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mlora_operator.manifests.secret import CertificatePair
from mlora_operator.reconcile.cluster.api_server import ApiServerCluster, Indexes
from mlora_operator.reconcile.cluster.rest_client import ApiError
from mlora_operator.reconcile.loop import Loop


class Api:
    """Notes the statuses that are written; there are no Secrets."""

    def __init__(self) -> None:
        self.statuses: dict[str, dict[str, Any]] = {}

    async def get(self, _path: str) -> dict[str, Any]:
        raise ApiError(404, "not found")

    async def merge_status(self, path: str, patch: dict[str, Any]) -> None:
        self.statuses[path.rsplit("/", 1)[1]] = patch["status"]

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        return manifest

    apply = create


class NoCoordinators:
    def follow(self, endpoints: Mapping[Any, Any]) -> None:
        pass

    def contacts(self) -> dict[Any, Any]:
        return {}


def unasked(host: str) -> CertificatePair:
    raise AssertionError(f"nobody asked for a certificate of {host}")


@pytest.mark.parametrize(
    "spec",
    [
        {"worker": {"env": [{"value": "no name"}]}},
        {"worker": {"env": [{"name": ["a"], "value": "b"}]}},
        {"worker": {"volumeMounts": [{"name": "a", "mountPath": {}}]}},
        {"memory": {"budget": "0.5"}},  # half a byte
    ],
    ids=str,
)
async def test_others_are_told_how_they_fare_and_it_is_told_what_is_wrong(
    make: Any, spec: dict[str, Any]
) -> None:
    bad = make.raw_pipeline("bad", "team-b", **spec)
    task = make.raw_task("t1", baseModel="nobody serves it")
    api = Api()
    nothing = lambda: ()  # noqa: E731
    indexes = Indexes(lambda: [task], lambda: [bad], nothing, nothing, nothing, nothing)
    cluster = ApiServerCluster(api, indexes, make.settings(), lambda: "token", unasked)  # type: ignore[arg-type]
    loop = Loop(cluster, NoCoordinators(), make.settings(), now=lambda: make.now)  # type: ignore[arg-type]
    assert await loop.step()
    assert api.statuses["t1"]["reason"] == "NoPipelineForModel"
    (ready,) = [one for one in api.statuses["bad"]["conditions"] if one["type"] == "Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert ready["message"].startswith(("spec.worker.", "spec: no workers can be created from it: "))
