"""The settings file: strict, and an error names the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.manifests import worker
from mlora_operator.settings import WORKER_PORTS, CatalogueModel, SettingsError, load_settings, parse_settings

LEAST = "namespace: mlora-system\nworker: {image: 'worker:1'}\n"
MODELS = "models: [{name: A, uri: 's3://a'}, {name: B, uri: 's3://b', "


def test_the_least_that_is_needed() -> None:
    settings = parse_settings(LEAST, "settings.yaml")
    assert (settings.namespace, settings.worker.image, settings.health.port) == (
        "mlora-system",
        "worker:1",
        8081,
    )
    assert settings.namespaces == ()


def test_json_is_read_too() -> None:
    assert parse_settings('{"namespace": "a", "worker": {"image": "w"}}', "x").namespace == "a"


def test_the_own_namespace_is_watched_with_the_others() -> None:
    settings = parse_settings(LEAST + "watchNamespaces: [team-b, team-a]\n", "x")
    assert settings.namespaces == ("mlora-system", "team-a", "team-b")


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("", {"mlora-system"}),
        ("serving: {namespaces: [team-b]}\n", {"mlora-system", "team-b"}),
        ("serving: {namespaces: ['*']}\n", {"mlora-system", "team-a", "team-b"}),
    ],
)
def test_which_namespaces_have_the_right_to_serve_others(text: str, others: set[str]) -> None:
    rights = parse_settings(LEAST + text, "x").rights
    namespaces = ("mlora-system", "team-a", "team-b")
    assert {one for one in namespaces if rights.serves_others(one)} == others
    assert all(rights.may_serve(one, one) for one in namespaces)


@pytest.mark.parametrize(
    ("text", "reach"),
    [
        ("", {"mlora-system": None, "team-a": 0, "team-b": 0}),
        ("priorities: {namespaces: {team-a: {max: 7}}}\n", {"mlora-system": None, "team-a": 7, "team-b": 0}),
        ("priorities: {default: {max: 3}}\n", {"mlora-system": None, "team-a": 3, "team-b": 3}),
        (
            "priorities: {default: {max: 3}, namespaces: {team-a: {}, mlora-system: {max: -1}}}\n",
            {"mlora-system": -1, "team-a": 3, "team-b": 3},
        ),
        ("serving: {namespaces: [team-a]}\n", {"mlora-system": None, "team-a": None, "team-b": 0}),
    ],
)
def test_how_far_a_namespaces_priorities_reach(text: str, reach: dict[str, int | None]) -> None:
    rights = parse_settings(LEAST + text, "x").rights
    assert {one: rights.reach(one) for one in reach} == reach


def test_a_model_of_the_catalogue_is_a_whole_pipeline() -> None:
    settings = parse_settings(
        LEAST + "models: [{name: Org/M, uri: 's3://m', stages: 2, idleTimeout: 1h}]\n", "x"
    )
    spec = settings.models[0].pipeline_spec()
    assert (spec.model.name, spec.stages, spec.idle_timeout) == ("Org/M", 2, "1h")
    assert spec.allowed_namespaces.from_ == "All"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a mapping"),
        ("[1]", "expected a mapping"),
        ("a: [", "not YAML"),
        ("namespace: x\n", "worker: is missing"),
        (LEAST + "healt: {}\n", "healt"),
        (LEAST + "health: {port: '8081x'}\n", "health.port"),
        (LEAST + "log: {format: xml}\n", "log.format"),
        (LEAST + "models: [{name: A, uri: 'ftp://m'}]\n", "models[0].uri"),
        (LEAST + "models: [{name: A, uri: 's3://m', stages: 0}]\n", "models[0].stages"),
        (
            LEAST + MODELS + "replicas: {min: 3, max: 2}}]\n",
            "models[1].replicas: min must not be more than max",
        ),
        (
            LEAST + "models: [{name: A, uri: 'hf://datasets/a/b'}]\n",
            "models[0].uri: the address of a base model must not name a data set",
        ),
        (
            LEAST + "coordinatorUrl: 'http://{hots}:{port}'\n",
            "coordinatorUrl: must be a URL whose placeholders",
        ),
        (LEAST + "coordinatorUrl: '{host}:{port}'\n", "coordinatorUrl: must be a URL whose placeholders"),
        (LEAST + "health: {port: 9000}\nmetrics: {enabled: true, port: 9000}\n", "must differ"),
        (
            LEAST + "coordinatorTls: true\ncoordinatorUrl: 'http://{host}'\n",
            "coordinatorUrl begins with http",
        ),
        (LEAST + "coordinatorTls: false\ncoordinatorUrl: 'https://{host}'\n", "coordinatorTls is false"),
        (LEAST + "coordinatorTls: 'no'\n", "coordinatorTls"),
        (LEAST + "serving: {namespaces: ['team_a']}\n", "serving.namespaces[0]"),
        (LEAST + "serving: {namespaces: 'team-a'}\n", "serving.namespaces"),
        (LEAST + "outputs: {prefixes: {team-a: [adapters/team-a]}}\n", "outputs.prefixes.team-a[0]"),
        (LEAST + "priorities: {default: 3}\n", "priorities.default"),
        (LEAST + "priorities: {namespaces: {team-a: {min: 3}}}\n", "priorities.namespaces.team-a.min"),
        (LEAST + "priorities: {default: {max: 1000001}}\n", "priorities.default.max"),
        ("namespace: x\nworker: {image: w, metricsPort: 29400}\n", "29400 is a port that workers use"),
        (
            LEAST + "models: [{name: A, uri: 's3://m'}, {name: A, uri: 's3://n'}]\n",
            "but these occur twice: A",
        ),
    ],
)
def test_an_error_names_file_and_field(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=r"settings\.yaml: ") as error:
        parse_settings(text, "settings.yaml")
    assert words in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.yaml"):
        load_settings(tmp_path / "absent.yaml")


def test_the_ports_that_workers_use_are_those_of_their_manifests() -> None:
    assert {worker.HTTP_PORT, worker.LINK_PORT, worker.RENDEZVOUS_PORT} == WORKER_PORTS


def test_an_entry_of_the_catalogue_has_every_field_of_a_pipeline_but_two() -> None:
    assert set(LoRAPipelineSpec.model_fields) - set(CatalogueModel.model_fields) == {
        "model",
        "allowed_namespaces",
    }
    entry = {"name": "m", "uri": "s3://models/m", "checkpoints": {"uri": "s3://checkpoints/all"}}
    assert CatalogueModel.model_validate(entry).pipeline_spec().checkpoints.uri == "s3://checkpoints/all"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080", "https://{name}-{namespace}.example.org:{port}/x", "{scheme}://{host}"]
)
def test_a_coordinators_url_may_hold_what_tells_pipelines_apart(url: str) -> None:
    assert parse_settings(LEAST + f"coordinatorUrl: '{url}'\n", "x").coordinator_url == url


@pytest.mark.parametrize(
    ("text", "encrypts"),
    [
        ("", True),
        ("coordinatorTls: false\n", False),
        ("coordinatorUrl: 'https://{name}.example'\n", True),
        ("coordinatorUrl: '{scheme}://{name}.example'\n", True),
        (
            "coordinatorUrl: 'http://{host}:{port}'\n",
            False,
        ),  # of a chart from before there was coordinatorTls
        ("coordinatorTls: false\ncoordinatorUrl: 'http://{host}:{port}'\n", False),
    ],
)
def test_coordinators_encrypt_unless_the_settings_say_otherwise(text: str, encrypts: bool) -> None:
    assert parse_settings(LEAST + text, "x").coordinators_encrypt is encrypts
