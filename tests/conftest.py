"""Fixtures for all tests; each file of ``tests/fixtures`` has one kind."""

from __future__ import annotations

from hypothesis import settings

from tests.fixtures.stories import stories

# How long an example takes is the machine's affair: a busy one must fail no test.
settings.register_profile("untimed", deadline=None, max_examples=stories(100))
settings.load_profile("untimed")

pytest_plugins = [
    "tests.fixtures.bench_rows",
    "tests.fixtures.browser",
    "tests.fixtures.cluster",
    "tests.fixtures.kube_server",
    "tests.fixtures.models",
    "tests.fixtures.small_models",
    "tests.fixtures.storage",
]
