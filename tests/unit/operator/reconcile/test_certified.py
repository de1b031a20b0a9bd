"""Which coordinators have a certificate: made once, made anew when it is gone, and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mlora_operator.manifests.secret import CertificatePair
from mlora_operator.reconcile.cluster.api_server import ApiServerCluster, Indexes
from mlora_operator.reconcile.cluster.rest_client import ApiError
from mlora_operator.reconcile.loop import Loop
from mlora_operator.reconcile.ports import CoordinatorTrust, Endpoint
from mlora_operator.reconcile.state.decision import DesiredWorkers
from mlora_operator.reconcile.state.snapshot import Contact, Key

TOY = Key("team-a", "toy")
HOST = "mlora-toy-0.mlora-toy.team-a.svc"


class Api:
    """Secrets by name, and what was applied. It knows no way to change a Secret, as the operator's account does not."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        self.tries = 0
        self.applied: dict[str, dict[str, Any]] = {}

    async def get(self, path: str) -> dict[str, Any]:
        name = path.rsplit("/", 1)[1]
        if name not in self.secrets:
            raise ApiError(404, "not found")
        return self.secrets[name]

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        assert manifest["kind"] == "Secret"
        self.tries += 1
        name = manifest["metadata"]["name"]
        if name in self.secrets:
            raise ApiError(409, "there is one")
        self.secrets[name] = manifest
        return manifest

    async def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.applied[manifest["kind"]] = manifest
        return {"metadata": {"generation": 1, "uid": "u"}}


def _raw(name: str, **annotations: str) -> dict[str, Any]:
    labels = {"mlora.dev/pipeline": "toy"}
    annotations |= {"mlora.dev/pipeline-name": "toy"}
    meta = {"namespace": "team-a", "name": name, "uid": name, "generation": 1}
    return {"metadata": meta | {"labels": labels, "annotations": annotations}}


class Followed:
    """The links, as far as the loop asks."""

    def __init__(self) -> None:
        self.endpoints: Mapping[Key, Endpoint] = {}

    def follow(self, endpoints: Mapping[Key, Endpoint]) -> None:
        self.endpoints = endpoints

    def contacts(self) -> dict[Key, Contact]:
        return {}


class Places:
    """A cluster with one StatefulSet, which a former operator made."""

    def __init__(self, make: Any, **settings: Any) -> None:
        self.api, self.made = Api(), 0
        self.pods = [_raw("mlora-toy-0")]
        there, nothing = [_raw("mlora-toy") | {"spec": {"replicas": 2}}], lambda: ()
        pipelines = lambda: [make.raw_pipeline()]  # noqa: E731
        indexes = Indexes(nothing, pipelines, lambda: there, nothing, lambda: self.pods, nothing)
        wanted = make.settings(**settings)
        self.cluster = ApiServerCluster(self.api, indexes, wanted, lambda: "token", self.certificate)  # type: ignore[arg-type]
        self.pipeline = make.pipeline()
        self.api.secrets["mlora-toy-token"] = {"data": {"token": "aHVzaA=="}}

    def certificate(self, host: str) -> CertificatePair:
        assert host == HOST
        self.made += 1
        return CertificatePair(f"certificate {self.made}", "key")

    async def apply(self) -> None:
        await self.cluster.apply_workers(DesiredWorkers(self.pipeline, 2))

    async def trust(self) -> CoordinatorTrust | None:
        return await self.cluster.read_trust(self.pipeline)


async def test_workers_of_a_former_operator_get_one_before_they_are_told_to_use_it(make: Any) -> None:
    places = Places(make)
    assert await places.trust() is None
    await places.apply()
    assert await places.trust() == CoordinatorTrust(HOST, "certificate 1", "Secret team-a/mlora-toy-tls")
    assert list(places.api.secrets["mlora-toy-token"]["data"]) == ["token"]


async def test_it_is_made_once_and_asked_for_no_more(make: Any) -> None:
    places = Places(make)
    for _ in range(3):
        await places.apply()
    assert (places.made, places.api.tries) == (1, 1)
    other = Places(make)
    other.api.secrets = places.api.secrets  # the operator started anew
    await other.apply()
    assert (await other.trust()) == (await places.trust())


async def test_one_that_was_deleted_is_made_anew_and_the_workers_stay_as_they_are(make: Any) -> None:
    places = Places(make)
    await places.apply()
    revision, applied = places.cluster.revision(places.pipeline), dict(places.api.applied)
    del places.api.secrets["mlora-toy-tls"]
    assert await places.trust() is None
    await places.apply()
    trust = await places.trust()
    assert trust is not None
    assert trust.certificate == "certificate 2"
    assert (places.cluster.revision(places.pipeline), places.api.applied) == (revision, applied)


async def test_a_secret_that_holds_none_is_no_reason_to_trust_anybody(make: Any) -> None:
    places = Places(make)
    places.api.secrets["mlora-toy-tls"] = {"data": {}}
    assert await places.trust() == CoordinatorTrust(HOST, "", "Secret team-a/mlora-toy-tls")


async def test_the_key_stays_in_its_secret(make: Any) -> None:
    places = Places(make)
    await places.apply()
    trust = await places.trust()
    assert trust is not None
    assert "key" not in (trust.host, trust.certificate, trust.origin)
    assert "certificate 1" not in repr(trust)


async def test_none_is_made_where_nothing_is_encrypted(make: Any) -> None:
    places = Places(make, coordinatorTls=False)
    await places.apply()
    assert places.made == 0


@pytest.mark.parametrize(
    ("url", "scheme", "address"),
    [
        ("{scheme}://{host}:{port}", "https", f"https://{HOST}:8080"),
        ("{scheme}://{host}:{port}", "http", f"http://{HOST}:8080"),
        ("https://{name}.{namespace}.example", "http", "https://toy.team-a.example"),
    ],
)
async def test_the_address_is_as_the_workers_serve_unless_the_setting_says_it(
    make: Any, url: str, scheme: str, address: str
) -> None:
    places = Places(make, coordinatorUrl=url)
    assert places.cluster.coordinator_url(places.pipeline, scheme) == address


async def test_a_coordinator_that_encrypts_is_followed_once_there_is_something_to_trust(make: Any) -> None:
    """One of a former version is spoken to in HTTP, and not after its pod has been replaced."""
    places, links = Places(make), Followed()
    loop = Loop(places.cluster, links, make.settings(), now=lambda: make.now)  # type: ignore[arg-type]
    await loop._observe()
    assert links.endpoints == {TOY: Endpoint(f"http://{HOST}:8080", "hush")}
    places.pods[0] = _raw("mlora-toy-0", **{"mlora.dev/scheme": "https"})
    await loop._observe()
    assert links.endpoints == {}
    await places.apply()
    await loop._observe()
    trust = CoordinatorTrust(HOST, "certificate 1", "Secret team-a/mlora-toy-tls")
    assert links.endpoints == {TOY: Endpoint(f"https://{HOST}:8080", "hush", trust)}
