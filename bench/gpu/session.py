"""``python -m bench.gpu.session``, which ``bench/gpu.sh`` starts: every test and benchmark that wants a GPU, in one go.

Each step is a process of its own with a time limit; one that fails or takes too long costs its own result only. What
matters most comes first, and what is there is written to ``$OUT/gpu.json`` after every step. The last line of the output
is the same JSON. ``--dry-run`` takes the same way on the CPU with tiny shapes. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
TIME = 465.0  # seconds for all steps
LEAST = 10.0  # no step is started with less
TAIL = 3000  # characters of a failed step's output that go into the result


@dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]  # arguments of Python
    limit: float  # seconds
    kind: str  # tests, bench, or look


KERNELS = (
    "tests/unit/worker/lora/test_triton_tables.py",
    "tests/unit/worker/lora/test_triton_products.py",
    "tests/unit/worker/model/test_triton_loss.py",
)
ENGINE = "tests/integration/worker/test_on_gpu.py"


def steps(dry_run: bool) -> list[Step]:
    if dry_run:  # most of the time goes into imports, so there are few processes
        return [
            Step("environment", ("-c", ENVIRONMENT), 60, "look"),
            Step("tests", pytest([*KERNELS, ENGINE, "tests/unit/bench/test_gpu.py"]), 240, "tests"),
            Step("1b", ("-m", "bench", "gpu", "--dry-run"), 240, "bench"),
        ]
    return [
        Step("environment", ("-c", ENVIRONMENT), 30, "look"),
        Step("kernels", pytest([*KERNELS, "tests/integration/worker/test_triton_kernels.py"]), 170, "tests"),
        Step("engine", pytest([ENGINE]), 120, "tests"),
        Step("1b", ("-m", "bench", "gpu", "--model", "1b"), 110, "bench"),
        Step("8b", ("-m", "bench", "gpu", "--model", "8b"), 120, "bench"),
        Step("1b-all-linear", ("-m", "bench", "gpu", "--targets", "all-linear"), 90, "bench"),
        Step("tiles", ("-m", "bench", "gpu", "--tiles"), 60, "bench"),
        Step("ranks", pytest(["tests/integration/worker/test_group.py"]), 120, "tests"),
    ]


def pytest(paths: Sequence[str]) -> tuple[str, ...]:
    """Without the tests' own conftest.py, which wants clusters and object stores."""
    plugins = ("tests.fixtures.models", "tests.fixtures.small_models", "tests.integration.worker.conftest")
    options = [option for plugin in plugins for option in ("-p", plugin)]
    return ("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *options, *paths)


# Without importing any of them.
ENVIRONMENT = """
import importlib.metadata, json, platform, shutil, subprocess
found = {"python": platform.python_version(), "cc": shutil.which("gcc") or shutil.which("clang")}
for name in ("torch", "triton", "transformers", "peft", "pydantic", "boto3", "numba"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
try:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    found["device"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip() or "none"
except (OSError, subprocess.TimeoutExpired):
    found["device"] = "none"
print(json.dumps(found))
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", help="names of steps, by commas")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="gpu-"))
    began = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    wanted = steps(options.dry_run)
    if options.only:
        wanted = [step for step in wanted if step.name in options.only.split(",")]
    for step in wanted:
        left = TIME - (time.monotonic() - began)
        if left < LEAST:
            results[step.name] = {"ok": False, "why": "no time was left"}
            continue
        print(f"== {step.name}", flush=True)
        results[step.name] = run(step, min(step.limit, left), out, options.dry_run)
        line = json.dumps(summary(results, options.dry_run, time.monotonic() - began))
        (out / "gpu.json").write_text(line + "\n")
    print(line)
    return 0 if all(result["ok"] for result in results.values()) else 1


def run(step: Step, limit: float, out: Path, dry_run: bool) -> dict[str, Any]:
    """Its output goes to the screen and, with that of all steps, to gpu.log."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["MLORA_TEST_DEVICE"] = "cpu" if dry_run else "cuda"
    if dry_run:
        environment["MLORA_TEST_DRY_RUN"] = "1"
    report = Path(tempfile.mkdtemp()) / "report.xml"
    command = [sys.executable, *step.command]
    if step.kind == "tests":
        command.append(f"--junitxml={report}")
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=limit, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        output, code = (said.decode(errors="replace") if isinstance(said, bytes) else said), 124
    spent = time.monotonic() - began
    print(output, flush=True)
    with (out / "gpu.log").open("a") as log:
        log.write(f"== {step.name}: {code} after {spent:.0f} s\n{output}\n")
    result: dict[str, Any] = {"ok": code == 0, "seconds": round(spent, 1), "exit": code}
    if report.exists():
        result |= counts(report)
    elif code == 0:
        result["result"] = json.loads(output.splitlines()[-1])
    if code != 0:
        result["tail"] = output[-TAIL:]
    return result


def counts(report: Path) -> dict[str, int]:
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    numbers = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = numbers["failures"] + numbers["errors"]
    return {
        "passed": numbers["tests"] - failed - numbers["skipped"],
        "failed": failed,
        "skipped": numbers["skipped"],
    }


def summary(results: dict[str, dict[str, Any]], dry_run: bool, spent: float) -> dict[str, Any]:
    """The figures that count, then all steps."""
    figures = {}
    for name in ("1b", "8b", "1b-all-linear"):
        result = results.get(name, {}).get("result")
        if result:
            keys = ("vs_peft", "vs_packed", "tokens_per_second", "mfu", "peak_gib", "kernels")
            figures[name] = {key: result[key] for key in keys}
    environment = results.get("environment", {}).get("result") or {}
    return {
        "bench": "gpu.sh",
        "device": environment.get("device"),
        "figures": figures,
        "ok": {name: result["ok"] for name, result in results.items()},
        "steps": results,
        "seconds": round(spent),
        "dry_run": dry_run,
    }


if __name__ == "__main__":
    raise SystemExit(main())
