"""Options that all benchmarks share."""

from __future__ import annotations

import argparse


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """With --quick, --long, --threads and --repetitions; a benchmark adds its own."""
    made = argparse.ArgumentParser(
        prog=f"python -m bench {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--quick",
        action="store_true",
        help="a model cut to few layers: shows that it runs, its figures mean nothing",
    )
    made.add_argument("--long", action="store_true", help="more repetitions, whatever time they take")
    made.add_argument("--threads", type=int, default=1, help="of each process, on both sides (default: 1)")
    made.add_argument(
        "--repetitions",
        type=int,
        default=None,
        help="of each side (default: see the benchmark's description)",
    )
    return made


def repetitions(options: argparse.Namespace, usual: int, long: int) -> int:
    """How many to do."""
    asked: int | None = options.repetitions
    if asked is not None:
        return max(1, asked)
    return 1 if options.quick else long if options.long else usual
