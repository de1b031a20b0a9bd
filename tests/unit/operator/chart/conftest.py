"""The chart, rendered by the real Helm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

CHART = Path(__file__).parents[4] / "charts" / "mlora-operator"

# The CRDs are long, and each rendering has them.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Objects = dict[tuple[str, str], dict[str, Any]]


def objects_of(rendered: dict[str, str]) -> Objects:
    """Rendered manifests by kind and name (a RoleBinding's with namespace); NOTES.txt under ("NOTES", "")."""
    found: Objects = {}
    for path, text in rendered.items():
        if path.endswith("NOTES.txt"):
            found["NOTES", ""] = {"text": text}
            continue
        for document in yaml.load_all(text, Loader=_LOADER):
            if document:
                name = document["metadata"]["name"]
                if document["kind"] == "RoleBinding":  # one of the same name in each namespace
                    name = f"{document['metadata']['namespace']}/{name}"
                key = (document["kind"], name)
                assert key not in found, f"{key} is rendered twice"
                found[key] = document
    return found


@pytest.fixture
def render() -> Callable[..., Objects]:
    """``render(values)``: the objects of release ``rel`` in namespace ``mlora-system``, or of others."""

    def rendered(values: dict[str, Any], release: str = "rel", namespace: str = "mlora-system") -> Objects:
        with helm_python.Chart.load(CHART) as chart:
            return objects_of(chart.render(values, name=release, namespace=namespace))

    return rendered
