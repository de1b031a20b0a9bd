"""Where a pipeline's base model may lie, and what its Secret has to hold: told before a worker starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.problem import describe
from mlora_operator.manifests.owner import Owner
from mlora_operator.manifests.worker import worker_config
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Key
from mlora_worker.protocol import HUB_ENDPOINT

MODEL = "Org/Toy-1B"  # that tasks of ``make`` name
TOKEN = {"HF_TOKEN": "hub-token"}
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}
S3 = {"uri": "s3://checkpoints/a"}


def ready(make: Any, secrets: Any = None, settings: Any = None, **spec: Any) -> tuple[int | None, str, str]:
    """Workers that are wanted, and why the pipeline is not Ready."""
    pipeline = make.pipeline(**spec)
    snapshot = make.snapshot(make.task(), pipelines=(pipeline,), secrets=secrets or {})
    (status,) = decide(snapshot, make.settings(**(settings or {})), make.now).pipeline_statuses.values()
    condition = next(one for one in status.conditions if one.type == "Ready")
    return status.replicas, condition.reason, condition.message


def model(uri: str) -> dict[str, str]:
    return {"name": MODEL, "uri": uri}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": model("http://127.0.0.1:80/tiny")}, "spec.model.uri"),
        ({"model": model("https://169.254.169.254/tiny")}, "spec.model.uri"),
        (
            {"model": model("hf://acme/tiny"), "worker": {"hubEndpoint": "http://[::1]"}},
            "spec.worker.hubEndpoint",
        ),
    ],
)
def test_an_address_that_only_a_worker_can_reach_starts_none(make: Any, spec: Any, field: str) -> None:
    replicas, reason, message = ready(make, **spec)
    assert (replicas, reason) == (0, "EndpointNotAllowed")
    assert message.startswith(f"{field}: ")
    allowed = {**spec, "worker": {**spec.get("worker", {}), "allowedNetworks": ["0.0.0.0/0", "::/0"]}}
    assert ready(make, **allowed)[0] == 2
    assert ready(make, settings={"allow_private_endpoints": True}, **spec)[0] == 2


@pytest.mark.parametrize(
    ("story", "uri", "checkpoints", "data", "reason"),
    [
        ("a hub's token", "hf://acme/tiny", None, TOKEN, None),
        ("keys of a store alone", "hf://acme/tiny", None, KEYS, "has no HF_TOKEN"),
        ("a hub, and checkpoints in a store", "hf://acme/tiny", S3, TOKEN, "has no AWS_ACCESS_KEY_ID"),
        ("a public model, and checkpoints in a store", "hf://acme/tiny", S3, KEYS, None),
        ("a web server needs nothing", "https://models.example/tiny", None, {}, None),
        ("a store needs keys", "s3://models/tiny", None, TOKEN, "has no AWS_ACCESS_KEY_ID"),
        ("no Secret", "hf://acme/tiny", None, None, "create it with HF_TOKEN"),
    ],
)
def test_a_secret_has_to_hold_what_the_model_and_checkpoints_need(
    make: Any, story: str, uri: str, checkpoints: Any, data: Any, reason: str | None
) -> None:
    spec: dict[str, Any] = {"model": model(uri), "storage": {"secretRef": {"name": "keys"}}}
    if checkpoints is not None:
        spec["checkpoints"] = checkpoints
    replicas, _, message = ready(make, {Key("team-a", "keys"): data}, **spec)
    assert replicas == (2 if reason is None else 0), story
    assert reason is None or reason in message, story


@pytest.mark.parametrize(
    "uri",
    [
        "hf://tiny",
        "hf://acme/tiny@v1",
        "https://host/tiny?signature=1",
        "https://host/#tiny",
        "ftp://a/b",
        "hf://",
    ],
)
def test_an_address_of_no_folder_is_refused_when_it_is_applied(uri: str) -> None:
    with pytest.raises(ValidationError) as caught:
        LoRAPipelineSpec.model_validate({"model": model(uri)})
    assert "hf://OWNER/NAME (with its revision in revision)" in describe(caught.value, "spec")


def test_workers_are_told_their_hub_and_how_much_they_may_keep() -> None:
    def config(**worker: Any) -> tuple[str, int]:
        spec = LoRAPipelineSpec.model_validate({"model": model("hf://acme/tiny"), "worker": worker})
        made = worker_config(Owner("ns", "tiny", "uid"), spec, "text", allow_file_uris=False)
        return made.hub_endpoint, made.model_cache_bytes

    assert config() == (HUB_ENDPOINT, 100 * 2**30)
    assert config(hubEndpoint="http://mirror:80", modelCache="0") == ("http://mirror:80", 0)
