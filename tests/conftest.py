"""Fixtures for all tests; each file of ``tests/fixtures`` has one kind."""

from __future__ import annotations

import atexit
import gc
import logging
import sys

from hypothesis import settings

from tests.fixtures.stories import stories

# How long an example takes is the machine's affair: a busy one must fail no test.
settings.register_profile("untimed", deadline=None, max_examples=stories(100))
settings.load_profile("untimed")

# Where it is installed, transformers imports it with several models, and calls it on a CPU. Tests of it are processes of
# their own.
sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # importing it fails

# What is imported stays, and it is a million objects: Python's collector need not look at them, neither while they are made
# nor later.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else libraries complain of what is left
    # To each logger that does not hand on what it is told pytest adds its handlers six times a test: PyTorch has dozens.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


pytest_plugins = [
    "tests.fixtures.bench_rows",
    "tests.fixtures.browser",
    "tests.fixtures.cluster",
    "tests.fixtures.kube_server",
    "tests.fixtures.models",
    "tests.fixtures.small_models",
    "tests.fixtures.storage",
]
