"""Names of users never become paths: refused by the types, and again before a request is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlora_operator.api.paths import UnsafePath, checked, collection, item
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.problem import describe
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.reconcile.cluster.rest_client import KubeApi
from mlora_operator.reconcile.state.decode import config_maps_wanted, read_task, secrets_wanted

NOW = "2026-01-01T00:00:00Z"
HOSTILE = (
    "../../mlora-system/secrets/s3-credentials",
    "team-b/creds",
    "..%2f..%2fmlora-system%2fsecrets%2fkeys",
    "..",
    ".",
    "",
    "keys?watch=true",
    "keys#x",
    "keys\nINFO everything is fine",
    "keys\n",
    "keys/",
    "Keys",
    "ｋeys",
    "keys\x00",
    "%6beys",
    "-keys",
    "keys-",
    "a..b",
    "a" * 254,
)


def spec_with(field: str, name: str) -> dict[str, Any]:
    """A task that is right but for one name."""
    spec: dict[str, Any] = {
        "baseModel": "m",
        "dataset": {"inline": "{}"},
        "output": {"uri": "s3://adapters/a"},
    }
    if field == "spec.storage.secretRef.name":
        return spec | {"storage": {"secretRef": {"name": name}}}
    if field == "spec.dataset.configMapRef.name":
        return spec | {"dataset": {"configMapRef": {"name": name, "key": "rows.jsonl"}}}
    if field == "spec.dataset.configMapRef.key":
        return spec | {"dataset": {"configMapRef": {"name": "rows", "key": name}}}
    assert field == "spec.dataset.chatTemplateRef.name"
    return spec | {"dataset": {"inline": "{}", "chatTemplateRef": {"name": name, "key": "template"}}}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "field",
    ["spec.storage.secretRef.name", "spec.dataset.configMapRef.name", "spec.dataset.chatTemplateRef.name"],
)
def test_a_task_with_a_name_that_is_a_path_is_refused_by_its_field(field: str, name: str) -> None:
    with pytest.raises(ValidationError) as refused:
        LoRATaskSpec.model_validate(spec_with(field, name))
    told = describe(refused.value, "spec")
    assert told.startswith(f"{field}: ")
    assert "\n" not in told


@pytest.mark.parametrize("key", ["a/b", "..%2fb", "a\nb", "a b", "", "a" * 254])
def test_a_key_of_a_config_map_is_no_path_either(key: str) -> None:
    with pytest.raises(ValidationError):
        LoRATaskSpec.model_validate(spec_with("spec.dataset.configMapRef.key", key))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pipeline_with_such_a_name_is_refused(name: str) -> None:
    model = {"name": "m", "uri": "s3://models/m"}
    for fields in (
        {"storage": {"secretRef": {"name": name}}},
        {"worker": {"priorityClassName": name}},
        {"worker": {"runtimeClassName": name}},
    ):
        with pytest.raises(ValidationError):
            LoRAPipelineSpec.model_validate({"model": model, **fields})


@pytest.mark.parametrize("name", ["s3-credentials", "a", "0", "a.b-c.d", "a" * 253])
def test_every_name_that_kubernetes_knows_is_taken(name: str) -> None:
    LoRATaskSpec.model_validate(spec_with("spec.storage.secretRef.name", name))
    path = item("v1", "secrets", "team-a", name)
    assert checked(path) == f"/api/v1/namespaces/team-a/secrets/{name}"


@pytest.mark.parametrize("name", HOSTILE)
def test_of_a_task_that_was_stored_before_the_rule_nothing_is_read(name: str) -> None:
    """The schema of the time let it through; it is in the API server still."""
    for field in ("spec.storage.secretRef.name", "spec.dataset.configMapRef.name"):
        raw = {
            "metadata": {"namespace": "team-a", "name": "t", "uid": "u", "creationTimestamp": NOW},
            "spec": spec_with(field, name),
        }
        read = read_task(raw, allow_file_uris=False)
        assert read.spec is None
        assert read.problem is not None
        assert field in read.problem
        assert not secrets_wanted([read], [])
        assert not config_maps_wanted([read])


class Recorded:
    """A client of the API server that only notes what it is asked."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def param_serialize(self, _: str, path: str, **__: Any) -> tuple[str]:
        self.paths.append(path)
        return (path,)

    async def call_api(self, *_: Any, **__: Any) -> Any:
        async def read() -> bytes:
            return b"{}"

        return SimpleNamespace(status=200, reason="OK", read=read)


@pytest.mark.parametrize("name", HOSTILE)
async def test_the_client_sends_no_such_request_whatever_it_is_given(name: str) -> None:
    recorded = Recorded()
    api = KubeApi(recorded)  # type: ignore[arg-type]
    for path in (item("v1", "secrets", "team-a", name), item("v1", "secrets", name, "keys")):
        with pytest.raises(UnsafePath) as refused:
            await api.get(path)
        assert "\n" not in str(refused.value)
    assert recorded.paths == []


@given(st.text(max_size=40), st.text(max_size=40))
def test_what_is_sent_has_the_parts_that_were_meant(namespace: str, name: str) -> None:
    path = item("mlora.dev/v1alpha1", "loratasks", namespace, name)
    try:
        checked(path)
    except UnsafePath:
        return
    assert path.split("/") == [
        "",
        "apis",
        "mlora.dev",
        "v1alpha1",
        "namespaces",
        namespace,
        "loratasks",
        name,
    ]
    assert not {".", "..", ""} & {namespace, name}


@pytest.mark.parametrize("path", ["", "/", "api/v1", "/api/v1/", "/api//v1", "//host/api", "/api/v1/../v2"])
def test_paths_of_other_shapes_are_refused(path: str) -> None:
    with pytest.raises(UnsafePath):
        checked(path)
    with pytest.raises(UnsafePath):
        checked(path, any_kind=True)


def test_a_users_own_objects_may_have_the_names_of_roles() -> None:
    path = item("rbac.authorization.k8s.io/v1", "roles", "a", "system:Reader_2")
    assert checked(path, any_kind=True) == path
    with pytest.raises(UnsafePath):
        checked(path)
    with pytest.raises(UnsafePath):
        checked(collection("v1", "secrets", "a") + "/..%2fx", any_kind=True)
