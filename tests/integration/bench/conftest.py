"""Triton's kernels are defined once in a process: here, before a benchmark imports them, so that tests interpret them."""

from tests.fixtures import group_cases

__all__ = ["group_cases"]
