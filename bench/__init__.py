"""Benchmarks: each one command, both sides in one run, ratios, the last line JSON."""
