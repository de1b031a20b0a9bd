"""Benchmarks: each one command, both sides in one run, ratios, the last line JSON.

``python -m bench`` lists them. What each compares, and what keeps it fair: docs/contributors/benchmarks.md.
"""
