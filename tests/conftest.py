"""Fixtures for all tests; each file of ``tests/fixtures`` has one kind."""

pytest_plugins = [
    "tests.fixtures.bench_rows",
    "tests.fixtures.browser",
    "tests.fixtures.cluster",
    "tests.fixtures.models",
    "tests.fixtures.small_models",
    "tests.fixtures.storage",
]
