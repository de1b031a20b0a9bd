"""docs/operators/metrics.md says what is exported, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.fixtures.exported_metrics import full_exporter, full_worker

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "operators" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(mlora_\w+)` \| (\w+) \| (.*?) \| (.+) \|$", re.MULTILINE)


def test_the_table_of_metrics_is_what_operator_and_workers_export() -> None:
    written = {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)), words)
        for name, kind, labels, words in ROW.findall(PAGE)
    }
    real = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name: (
            metric.type,
            frozenset(label for sample in metric.samples for label in sample.labels) - {"le"},
            metric.documentation,
        )
        for registry in (full_exporter().registry, full_worker())
        for metric in registry.collect()
        if not metric.name.startswith("process_")
    }
    assert written == real
    assert len(ROW.findall(PAGE)) == len(written), "each metric has one row"


def test_the_table_of_alerts_is_what_the_chart_installs() -> None:
    rules = yaml.safe_load((ROOT / "charts" / "mlora-operator" / "files" / "alerts.yaml").read_text())
    real = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert re.findall(r"^\| `(MLoRA\w+)` \|", PAGE, re.MULTILINE) == real
