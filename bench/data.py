"""``python -m bench data``: rows per second from a file to a first step, against the tokenizers library alone.

A file of JSON Lines is made of GSM8K's rows with other digits in each. One side prepares it as a worker does: reads,
renders every row with the chat template, proves what is supervised, tokenises, writes the arrays, opens them. The other
gives ``encode_batch`` of the tokenizers library the same rows, rendered beforehand. Both use all cores. The library is
timed alone on a part of the file before and after, since its speed does not depend on the number of rows; so is what the
machine did meanwhile in the figures.

``tokenizer_ratio``       our rows per second over the library's
``rss_mib``               most memory that our process ever held, packages included
``start_seconds``         from the last tokenised row to the first step's tokens and labels
``cached_start_seconds``  the same when the rows are there from an earlier run: the file is hashed, nothing is tokenised
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.base import smollm2_folder
from bench.options import parser, repetitions
from bench.report import last_line, table
from bench.rows import GSM8K

ROWS, QUICK_ROWS, RAW_ROWS = 1_000_000, 20_000, 50_000
GOALS = {"tokenizer_ratio": 0.8, "rss_mib": 1024, "start_seconds": 1.0}
_DIGIT = re.compile(r"\d")


def main(arguments: list[str]) -> int:
    made = parser("data", __doc__)
    made.add_argument(
        "--rows", type=int, default=None, help=f"of the file (default: {ROWS}; --quick: {QUICK_ROWS})"
    )
    options = made.parse_args(arguments)
    count = options.rows or (QUICK_ROWS if options.quick else ROWS)
    model = smollm2_folder()
    runs = [one_run(count, model) for _ in range(repetitions(options, usual=1, long=3))]
    result = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    print(
        table(
            ["side", "rows", "seconds", "rows/s"],
            [
                ["prepare()", count, result["seconds"], result["rows_per_second"]],
                [
                    "tokenizers alone",
                    min(count, RAW_ROWS),
                    result["raw_seconds"],
                    result["raw_rows_per_second"],
                ],
            ],
        )
    )
    print()
    print(table(["figure", "value", "goal"], [[name, result[name], goal] for name, goal in GOALS.items()]))
    print(
        last_line(
            "data",
            {"rows": count, **result},
            repetitions=len(runs),
            threads=len(os.sched_getaffinity(0)),
            quick=options.quick,
        )
    )
    return 0


def one_run(count: int, model: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        whole, part = scratch / "rows.jsonl", scratch / "part.jsonl"
        write_rows(whole, count)
        write_rows(part, min(count, RAW_ROWS))
        before = side("raw", part, model, scratch)
        ours = side("ours", whole, model, scratch)
        after = side("raw", part, model, scratch)
    raw_seconds = (before["seconds"] + after["seconds"]) / 2
    speed, raw_speed = ours["rows"] / ours["seconds"], before["rows"] / raw_seconds
    return {
        "tokenizer_ratio": speed / raw_speed,
        "rss_mib": ours["rss_mib"],
        "start_seconds": ours["start_seconds"],
        "cached_start_seconds": ours["cached_start_seconds"],
        "seconds": ours["seconds"],
        "rows_per_second": speed,
        "tokens_per_second": ours["tokens"] / ours["seconds"],
        "raw_seconds": raw_seconds,
        "raw_rows_per_second": raw_speed,
    }


def write_rows(path: Path, count: int, seed: int = 0) -> None:
    """The same rows for the same count and seed."""
    examples = GSM8K.read_text(encoding="utf-8").splitlines()
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            digits = f"{draw.getrandbits(400):0120d}"
            row = _with_digits(examples[number % len(examples)], digits)
            file.write(re.sub(r"\\u\w{4}", "?", row) + "\n")


def _with_digits(row: str, digits: str) -> str:
    """``row`` with these digits instead of its own, as far as there are some."""
    fresh = iter(digits)
    return _DIGIT.sub(lambda found: next(fresh, found.group()), row)


def side(name: str, file: Path, model: Path, scratch: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.data_sides", name, str(file), str(model), str(scratch)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made
