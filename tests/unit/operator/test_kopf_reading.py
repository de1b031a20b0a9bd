"""What the operator takes of kopf that kopf does not promise."""

from __future__ import annotations

import importlib
import inspect
import operator
from importlib.metadata import version

import pytest

# What ``kopf_reading`` replaces, and the parameters by which kopf calls it; then what it calls itself.
REPLACED = {
    ("kopf._cogs.clients.fetching", "fetch_objs"): {"settings", "resource", "namespace", "logger"},
    ("kopf._cogs.clients.watching", "watch_objs"): {
        "settings", "resource", "namespace", "since", "operator_pause_waiter",
    },
}  # fmt: skip
CALLED = {
    ("kopf._cogs.clients.api", "request"): {"method", "url", "settings", "headers", "logger"},
    ("kopf._cogs.structs.references", "Resource.get_url"): {"namespace", "params"},
    ("kopf._cogs.clients.errors", "APIClientError.status"): set(),
}
ADVICE = "adapt operator/mlora_operator/kopf_reading.py, or keep kopf below this version in pyproject.toml"


@pytest.mark.parametrize(("where", "parameters"), [*REPLACED.items(), *CALLED.items()])
def test_kopf_still_has_the_private_functions_that_are_replaced_or_called(
    where: tuple[str, str], parameters: set[str]
) -> None:
    module, path = where
    try:
        found = operator.attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        pytest.fail(f"kopf {version('kopf')} has no {module}.{path} ({error}): {ADVICE}")
    present = set(inspect.signature(found).parameters) if callable(found) else set()
    if where in REPLACED:
        assert present == parameters, f"kopf {version('kopf')} calls {module}.{path} otherwise: {ADVICE}"
    else:
        assert parameters <= present, (
            f"kopf {version('kopf')} takes other arguments in {module}.{path}: {ADVICE}"
        )
