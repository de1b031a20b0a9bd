"""Hostile objects before the real API server; `python -m bench fuzz --long` sends ten thousand."""

from __future__ import annotations

import asyncio

import pytest

from bench.fuzz import measure
from bench.operator_parts.server import access
from tests.fixtures.cluster import Cluster

pytestmark = pytest.mark.integration


def test_no_hostile_object_leaves_its_namespace_or_stops_a_pass(cluster: Cluster) -> None:
    figures = asyncio.run(measure(300, 7, access(cluster.kubeconfig)))
    assert figures["objects"] == 300
    assert figures["stored"] > 100, "the half that meets no bounds has to reach the operator"
    assert figures["honest"] >= 3
    found = {name: figures[f"{name}_first"] for name in ("escaped", "passes_stopped", "forged", "unanswered")}
    assert found == {"escaped": [], "passes_stopped": [], "forged": [], "unanswered": []}
