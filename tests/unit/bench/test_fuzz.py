"""The judge of the fuzz notices what it is there for, and the objects reach every field."""

from __future__ import annotations

from random import Random

import pytest

from bench.fuzz_parts.fields import fields, spoilt, without_bounds
from bench.fuzz_parts.judge import Ground, escaped, forged
from bench.fuzz_parts.texts import FORGED, Hostile
from mlora_operator.api.crd import pipeline_crd, task_crd
from tests.fixtures.api_proxy import Request

GROUND = Ground("hostile", "own", frozenset({"s3-credentials"}))


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/namespaces/hostile/secrets/../../victim/secrets/keys",
        "/api/v1/namespaces/hostile/secrets/..%2f..%2fvictim%2fsecrets%2fkeys",
        "/api/v1/namespaces/hostile/secrets/..%252fkeys",
        "/api/v1/namespaces/victim/secrets/keys",
        "/api/v1/namespaces/own/secrets/another",
        "/api/v1/namespaces/own/configmaps/another",
        "/api/v1/namespaces/victim",
        "/api/v1/namespaces/hostile/secrets/",
        "/api/v1/namespaces/hostile/secrets/x?export=true",
        "/healthz",
        "/apis/apps/v1/namespaces/victim/statefulsets/x",
    ],
)
def test_a_request_that_leaves_is_noticed(path: str) -> None:
    assert escaped([Request("GET", path, 0.0)], GROUND) == [f"GET {path}"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/namespaces/hostile/secrets/keys",
        "/api/v1/namespaces/own/secrets/s3-credentials",
        "/api/v1/namespaces/hostile",
        "/apis/mlora.dev/v1alpha1/loratasks?watch=true&resourceVersion=1",
        "/api/v1/namespaces/victim/pods?labelSelector=a%3Db",
        "/apis/mlora.dev/v1alpha1/namespaces/hostile/loratasks/x/status?fieldManager=mlora-operator",
    ],
)
def test_a_request_of_the_ordinary_course_is_not(path: str) -> None:
    assert escaped([Request("GET", path, 0.0)], GROUND) == []


def test_a_line_that_no_record_has_made_is_noticed() -> None:
    record = "2026-01-01T00:00:00.000Z WARNING cannot read x"
    assert forged(f"{record}\n  Traceback\n  ValueError: x\n{record}") == []
    assert forged(f"{record}\n{FORGED} ERROR   forged") == [f"{FORGED} ERROR   forged"]
    assert forged(f"{record}\u2028all is well") == ["all is well"]


@pytest.mark.parametrize("crd", [task_crd(), pipeline_crd()], ids=["task", "pipeline"])
def test_every_field_gets_something_hostile_and_nothing_bounds_it(crd: dict) -> None:  # type: ignore[type-arg]
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    found = list(fields(schema))
    assert len(found) == len({one.path for one in found}) > 30
    hostile, random = Hostile("victim", Random(0)), Random(0)
    for one in found:
        assert spoilt({}, [one], hostile, random), one
    loose = str(without_bounds(crd)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"])
    assert not any(f"'{bound}'" in loose for bound in ("maxLength", "x-kubernetes-validations", "maximum"))
