"""The page of one task: all that helps, and nothing that is not for every reader."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from mlora_operator.page.detail import MOST_FIELDS, fetch_command, spec_fields, task_detail
from mlora_operator.page.order import Standing
from mlora_operator.page.service import PageService
from mlora_operator.reconcile.state.decode import read_task
from mlora_worker.protocol import AdapterInfo, DataCounts
from tests.fixtures.page_scene import INJECTED, ROW, Scene
from tests.fixtures.raw_object import raw_object

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
MARKUP = "<b onmouseover=alert(1)>"


@pytest.fixture(scope="module")
def service() -> PageService:
    return PageService(Scene(NOW, waiting=4).board(), lambda: "", lambda: NOW)


def asked(service: PageService, task: str) -> dict[str, Any]:
    return json.loads(service.task({"task": task}).body)  # type: ignore[no-any-return]


def standing(
    spec: Mapping[str, Any] | None = None, status: Mapping[str, Any] | None = None, name: str = "t"
) -> Standing:
    whole = {
        "baseModel": "m",
        "dataset": {"uri": "s3://data/rows.jsonl"},
        "output": {"uri": "s3://adapters/x"},
        **(spec or {}),
    }
    task = read_task(raw_object("n", name, NOW, whole, status or {}), allow_file_uris=False)
    assert task.spec is not None, task.problem
    return Standing(task, task.status)


def fields_of(spec: Mapping[str, Any]) -> dict[str, str]:
    found = standing(spec).task.spec
    assert found is not None
    return {one.name: one.value for one in spec_fields(found)}


def test_a_task_in_training_has_progress_eta_conditions_events_and_its_whole_curve(
    service: PageService,
) -> None:
    detail = asked(service, "support/tickets-de")
    assert detail["task"]["eta"] == "1m28s"
    assert detail["curve"]["steps"][-1] == 148
    assert len(detail["curve"]["steps"]) > 60
    assert detail["curve"]["evaluations"]
    assert [one["type"] for one in detail["conditions"]][:2] == ["Accepted", "Admitted"]
    assert {one["reason"] for one in detail["events"]} >= {"Admitted"}
    assert detail["data"]["used"] == 7470
    assert detail["fetch"] == "mlora fetch tickets-de -n support --wait"


def test_a_task_of_pairs_has_the_figures_of_its_status() -> None:
    figures = {
        "rewardMargin": "0.41",
        "rewardAccuracy": "0.75",
        "chosenLogps": "-12.5",
        "rejectedLogps": "none of your business",
    }
    detail = task_detail(standing(status=figures), None, (), by_name=True)
    assert (detail.reward_margin, detail.reward_accuracy, detail.chosen_logps) == (0.41, 0.75, -12.5)
    assert detail.rejected_logps is None


def test_the_spec_is_shown_with_its_defaults_and_without_rows(service: PageService) -> None:
    spec = {one["name"]: one["value"] for one in asked(service, "support/tickets-de")["spec"]}
    assert spec["lora.rank"] == "16"
    assert spec["lora.targetModules"] == "all-linear"
    assert spec["training.batchSize"] == "8"
    assert spec["dataset.inline"].endswith("characters in the task itself")
    assert ROW not in json.dumps(spec)
    assert not [name for name in spec if name.startswith("storage")]


def test_templates_endpoints_and_what_stands_in_addresses_is_not_shown() -> None:
    shown = fields_of(
        {
            "dataset": {
                "uri": "https://data.example/rows.jsonl?X-Amz-Signature=0123456789abcdef",
                "format": "messages",
                "chatTemplate": "{{ secret recipe }}",
                "fields": {"messages": "turns"},
            },
            "storage": {"endpoint": "http://10.0.0.7:9000", "secretRef": {"name": "keys-of-legal"}},
        }
    )
    text = json.dumps(shown)
    for hidden in ("0123456789abcdef", "secret recipe", "10.0.0.7", "keys-of-legal"):
        assert hidden not in text, hidden
    assert shown["dataset.uri"] == "https://data.example/rows.jsonl?***"
    assert shown["dataset.fields.messages"] == "turns"
    assert "dataset.fields.prompt" not in shown


def test_a_large_spec_is_cut() -> None:
    rows = {f"{number:04d}" + "x" * 60: 8 for number in range(64)}
    lora = {"rankPattern": rows, "alphaPattern": dict.fromkeys(rows, 8)}
    one = standing({"lora": lora, "dataset": {"uris": ["s3://data/" + "y" * 1000] * 64}})
    detail = task_detail(one, None, (), by_name=True)
    assert len(detail.spec) <= MOST_FIELDS
    assert len(detail.to_json()) < 100_000
    assert max(len(field.value) for field in detail.spec) <= 500


def test_a_task_whose_spec_is_wrong_says_why_and_shows_none() -> None:
    one = standing()
    wrong = Standing(replace(one.task, spec=None, problem="spec.lora.rank: too low"), one.status)
    assert task_detail(wrong, None, (), by_name=True).spec == ()


def test_dropped_rows_have_their_rule_and_their_first_lines() -> None:
    counts = DataCounts(
        rows=10,
        used=7,
        dropped={MARKUP: 2, "tooLong": 1},
        first_dropped={MARKUP: (3, 4), "tooLong": (9,)},
        first_dropped_in={MARKUP: ("a.jsonl", "https://u:pw@h/b.jsonl?sig=1")},
    )
    one = standing(status={"data": counts.model_dump(by_alias=True)})
    data = task_detail(one, None, (), by_name=True).data
    assert data is not None
    assert [(row.rule, row.count, row.first) for row in data.dropped] == [
        (MARKUP, 2, ("3 of a.jsonl", "4 of https://***@h/b.jsonl?***")),
        ("tooLong", 1, ("9",)),
    ]


@pytest.mark.parametrize(
    ("state", "by_name", "command"),
    [
        ("Succeeded", True, "mlora fetch t -n n"),
        ("Training", True, "mlora fetch t -n n --wait"),
        ("Failed", True, None),
        ("Succeeded", False, "mlora fetch s3://adapters/x"),
        ("Training", False, None),
    ],
)
def test_the_command_that_fetches_the_adapter(state: str, by_name: bool, command: str | None) -> None:
    adapter = AdapterInfo(uri="s3://adapters/x", sha256="ab" * 32, bytes=1)
    one = standing(status={"state": state, "adapter": adapter.model_dump(by_alias=True)})
    assert fetch_command(one, by_name=by_name) == command


def test_no_name_and_no_address_makes_a_second_command_of_the_one_that_is_copied() -> None:
    one = standing(status={"state": "Succeeded"}, name="x; rm -rf ~ $(id) 'y'\n")
    command = fetch_command(one, by_name=True)
    assert command is not None
    assert shlex.split(command) == ["mlora", "fetch", "x; rm -rf ~ $(id) 'y'\n", "-n", "n"]


def test_hostile_messages_stay_the_text_that_they_are() -> None:
    scene = Scene(NOW, waiting=0, hostile=True)
    service = PageService(scene.board(), lambda: "", lambda: NOW)
    failed = asked(service, "support/nightly-23")
    assert INJECTED in failed["conditions"][-1]["message"] or INJECTED in json.dumps(failed["conditions"])
    assert failed["task"]["state"] == "Failed"
    assert "fetch" not in failed
