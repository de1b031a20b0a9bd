"""A spec has a size as a whole, which the operator and `mlora validate` say alike."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from mlora_operator.api.spec_size import LARGEST_SPEC, oversized
from mlora_operator.local.manifests import read_manifests
from mlora_operator.reconcile.state.decode import read_pipeline, read_task
from tests.fixtures.raw_object import raw_object

WIDE = "😀" * 65_536  # each field's own bound counts characters
TASK: dict[str, Any] = {
    "baseModel": "m",
    "dataset": {"inline": WIDE, "chatTemplate": WIDE},
    "output": {"uri": "s3://adapters/a"},
}
PIPELINE: dict[str, Any] = {
    "model": {"name": "m", "uri": "s3://models/m"},
    "worker": {
        "volumes": [{"name": f"v{n}", "configMap": {"name": "c" * 200, "items": []}} for n in range(256)],
        "podAnnotations": {f"a{n}": "😀" * 4096 for n in range(64)},
    },
}
WORDS = "and may have 524,288: put rows into a store"


@pytest.mark.parametrize(("kind", "spec"), [("LoRATask", TASK), ("LoRAPipeline", PIPELINE)])
def test_a_spec_that_is_too_large_as_a_whole_is_refused_by_both(kind: str, spec: dict[str, Any]) -> None:
    raw = raw_object("n", "a", datetime(2026, 3, 1, tzinfo=UTC), spec, None)
    read = read_task(raw, allow_file_uris=False) if kind == "LoRATask" else read_pipeline(raw)
    assert read.spec is None
    assert read.problem is not None
    assert read.problem.startswith("spec: has ")
    assert WORDS in read.problem
    manifest = {"apiVersion": "mlora.dev/v1alpha1", "kind": kind, "metadata": {"name": "a"}, "spec": spec}
    (problem,) = read_manifests([("a.yaml", json.dumps(manifest, ensure_ascii=False))]).problems
    assert WORDS in str(problem)


def test_the_bound_is_exact_and_counts_bytes() -> None:
    assert oversized({"a": "x" * (LARGEST_SPEC - 8)}) is None
    assert oversized({"a": "x" * (LARGEST_SPEC - 7)}) is not None
    assert oversized({"a": "😀" * (LARGEST_SPEC // 4)}) is not None
