"""Benchmarks on one GPU; ``bench/gpu.sh`` runs all of them, with the tests that need a GPU."""


def main(arguments: list[str]) -> int:
    """``python -m bench gpu``."""
    # Not at the top: bench/gpu/session.py must start where a package is missing, to say which.
    from bench.gpu.compare import main as compare

    return compare(arguments)
