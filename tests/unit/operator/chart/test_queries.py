"""Every query of the dashboard and of the alerts finds what is exported."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.fixtures.exported_metrics import Exported, exported, full_exporter, full_worker
from tests.fixtures.promql import WrongQuery, labels_of

from .conftest import CHART

DASHBOARD: dict[str, Any] = json.loads((CHART / "files" / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def known() -> dict[str, Exported]:
    return exported(full_exporter().registry) | exported(full_worker())


def plain(query: str) -> str:
    """Without Grafana's variables."""
    return query.replace("$__rate_interval", "5m").replace("$pipeline", ".*")


@pytest.mark.parametrize("title", [panel["title"] for panel in PANELS])
def test_a_panel_asks_for_what_there_is(title: str, known: dict[str, Exported]) -> None:
    (panel,) = [panel for panel in PANELS if panel["title"] == title]
    assert panel["targets"]
    for target in panel["targets"]:
        labels = labels_of(plain(target["expr"]), known)
        named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert named <= labels, (title, named - labels)


@pytest.mark.parametrize("name", [rule["alert"] for rule in RULES])
def test_an_alert_asks_for_what_there_is_and_tells_what_it_knows(
    name: str, known: dict[str, Exported]
) -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == name]
    labels = labels_of(rule["expr"], known)
    text = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert re.fullmatch(r"[0-9]+m", rule["for"])


def test_the_dashboard_shows_each_thing_that_operators_ask_about() -> None:
    queries = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    for name in (
        "mlora_tasks_waiting", "mlora_task_wait_seconds", "memory_predicted", "memory_used", "tokens_total",
        "busy_seconds", "preempted_total", "finished_total", "api_requests_total",
    ):  # fmt: skip
        assert name in queries, name


def test_panels_lie_beside_each_other_and_have_numbers_of_their_own() -> None:
    places = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))


def test_variables_of_the_dashboard_are_those_that_it_uses(known: dict[str, Exported]) -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == variables.keys()
    metric, label = re.fullmatch(
        r"label_values\((\w+), (\w+)\)", variables["pipeline"]["definition"]
    ).groups()  # type: ignore[union-attr]
    assert label in known[metric].labels


@pytest.mark.parametrize(
    "query",
    [
        "sum(mlora_tasks_wating)",
        "mlora_task_wait_seconds",
        "mlora_tasks_waiting_bucket",
        'sum(mlora_tasks_waiting{prio="1"})',
        "sum by (stage) (mlora_tasks_waiting)",
        "rate(mlora_tasks_waiting[5m])",
        "mlora_tasks_preempted_total",
        "histogram_quantile(0.9, sum by (priority) (rate(mlora_task_wait_seconds_bucket[5m])))",
        "histogram_quantile(0.9, sum by (le) (rate(mlora_task_wait_seconds_sum[5m])))",
        "sum by (pipeline) (mlora_tasks_waiting) / sum by (stage) (mlora_pipeline_memory_used_bytes)",
        "sum by (pipeline) (mlora_tasks_waiting) and on (stage) mlora_pipeline_memory_used_bytes",
    ],
)
def test_a_query_that_would_find_nothing_is_told(query: str, known: dict[str, Exported]) -> None:
    with pytest.raises(WrongQuery):
        labels_of(query, known)
