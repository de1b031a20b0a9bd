"""The chart, rendered by the real Helm."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures import helm

CHART = Path(__file__).parents[4] / "charts" / "mlora-operator"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Objects = dict[tuple[str, str], dict[str, Any]]


@functools.cache
def _pickled_documents(text: str) -> bytes:
    return pickle.dumps(list(yaml.load_all(text, Loader=_LOADER)))


def documents_of(text: str) -> list[Any]:
    """Of most files the text is the same whatever the values are, so it is parsed once."""
    return pickle.loads(_pickled_documents(text))  # type: ignore[no-any-return]


def objects_of(rendered: dict[str, str]) -> Objects:
    """Rendered manifests by kind and name (a RoleBinding's with namespace); NOTES.txt under ("NOTES", "")."""
    found: Objects = {}
    for path, text in rendered.items():
        if path.endswith("NOTES.txt"):
            found["NOTES", ""] = {"text": text}
            continue
        for document in documents_of(text):
            if document:
                name = document["metadata"]["name"]
                if document["kind"] == "RoleBinding":  # one of the same name in each namespace
                    name = f"{document['metadata']['namespace']}/{name}"
                key = (document["kind"], name)
                assert key not in found, f"{key} is rendered twice"
                found[key] = document
    return found


@pytest.fixture(scope="session")
def chart() -> Iterator[helm.Chart]:
    """Read once: most of the time of a rendering goes into reading the files."""
    with helm.Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def render(chart: helm.Chart) -> Callable[..., Objects]:
    """``render(values)``: the objects of release ``rel`` in namespace ``mlora-system``, or of others.

    Many tests look at the same values, so each is rendered once; every caller has objects of its own.
    """

    @functools.cache
    def pickled(values: str, release: str, namespace: str) -> bytes:
        return pickle.dumps(objects_of(chart.render(json.loads(values), name=release, namespace=namespace)))

    def rendered(values: dict[str, Any], release: str = "rel", namespace: str = "mlora-system") -> Objects:
        found: Objects = pickle.loads(pickled(json.dumps(values), release, namespace))
        return found

    return rendered
