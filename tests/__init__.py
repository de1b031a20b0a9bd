"""Tests, and the test cluster that they run on. A package, so that `tests.cluster` never means another one."""
