"""``python -m bench.gpu.session``, which ``bench/gpu.sh`` starts: every test and benchmark that wants a GPU, in one go.

Each step is a process of its own with a time limit; one that fails or takes too long costs its own result only, and of a
benchmark that is stopped the figures that it had printed remain. What matters most comes first. ``$OUT/gpu.log`` is written
line by line, ``$OUT/gpu.json`` after every step; the last line of the output is the same JSON. ``--dry-run`` takes the same
way on the CPU with tiny shapes. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parent.parent.parent
TIME = 560.0  # seconds for all steps, unless --seconds says otherwise
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
    "tests/unit/worker/model/test_fused_on_gpu.py",
)
STATES = ("tests/unit/worker/model/recurrent/test_convolution.py", "tests/integration/worker/scans.py")
PROCESSES = 6  # that compile kernels side by side, where pytest-xdist is there
ENGINE = "tests/integration/worker/test_on_gpu.py"


def steps(dry_run: bool) -> list[Step]:
    if dry_run:  # most of the time goes into imports, so there are few processes
        return [
            Step("environment", ("-c", ENVIRONMENT), 60, "look"),
            Step(
                "tests", pytest([*KERNELS, STATES[0], ENGINE, "tests/unit/bench/test_gpu.py"]), 420, "tests"
            ),
            Step("1b", bench(), 240, "bench"),
            *(Step(name, bench(f"--{name}"), 240, "bench") for name in ("hybrids", "forms", "experts")),
        ]
    return [
        Step("environment", ("-c", ENVIRONMENT), 30, "look"),
        Step("engine", pytest([ENGINE]), 90, "tests"),
        Step("1b", bench("--model", "1b"), 110, "bench"),
        Step("8b", bench("--model", "8b"), 120, "bench"),
        Step("kernels", pytest([*KERNELS, "tests/integration/worker/test_triton_kernels.py"]), 150, "tests"),
        Step("states", pytest(STATES), 90, "tests"),
        Step("hybrids", bench("--hybrids"), 90, "bench"),
        Step("forms", bench("--forms"), 90, "bench"),
        Step("experts", bench("--experts"), 45, "bench"),
        Step("1b-all-linear", bench("--targets", "all-linear"), 90, "bench"),
        Step("tiles", bench("--tiles"), 60, "bench"),
        Step("ranks", pytest(["tests/integration/worker/test_group.py"]), 120, "tests"),
    ]


def bench(*options: str) -> tuple[str, ...]:
    return ("-m", "bench", "gpu", *options)


def pytest(paths: Sequence[str]) -> tuple[str, ...]:
    """Without the tests' own conftest.py, which wants clusters and object stores."""
    plugins = ("tests.fixtures.models", "tests.fixtures.small_models", "tests.integration.worker.conftest")
    options = [option for plugin in plugins for option in ("-p", plugin)]
    if importlib.util.find_spec("xdist") is not None and (os.cpu_count() or 1) > PROCESSES:
        options += ["-n", str(PROCESSES)]
    return ("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *options, *paths)


# Without importing any of them.
ENVIRONMENT = """
import importlib.metadata, json, platform, shutil, subprocess
found = {"python": platform.python_version(), "cc": shutil.which("gcc") or shutil.which("clang")}
names = "torch triton transformers peft pydantic boto3 numba google-re2 fla-core bitsandbytes pytest-xdist"
for name in names.split():
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
    parser.add_argument("--only", help="names of steps, by commas, in the order of their importance")
    parser.add_argument("--seconds", type=float, default=TIME, help="for all steps (default: %(default)s)")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="gpu-"))
    began = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    wanted = steps(options.dry_run)
    if options.only:
        unknown = set(options.only.split(",")) - {step.name for step in wanted}
        if unknown:
            parser.error(
                f"no step is called {', '.join(sorted(unknown))}: {', '.join(s.name for s in wanted)}"
            )
        wanted = [step for step in wanted if step.name in options.only.split(",")]
    for step in wanted:
        left = options.seconds - (time.monotonic() - began)
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
    """Its output goes to the screen and to gpu.log, with that of all steps, as it comes."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["MLORA_TEST_DEVICE"] = "cpu" if dry_run else "cuda"
    if dry_run:
        environment["MLORA_TEST_DRY_RUN"] = "1"
    report = Path(tempfile.mkdtemp()) / "report.xml"
    command = [sys.executable, *step.command]
    if step.kind == "tests":
        command.append(f"--junitxml={report}")
    if step.kind == "bench" and dry_run:
        command.append("--dry-run")
    began = time.monotonic()
    with (out / "gpu.log").open("a") as log:
        log.write(f"== {step.name}\n")
        lines, code = _followed(command, environment, limit, log)
        spent = time.monotonic() - began
        log.write(f"== {step.name}: {code} after {spent:.0f} s\n")
    result: dict[str, Any] = {"ok": code == 0, "seconds": round(spent, 1), "exit": code}
    said = next((found for line in reversed(lines) if (found := _object(line)) is not None), None)
    if report.exists():
        result |= counts(report)
    elif said is not None:
        result["result"] = said
    if code != 0:
        result["tail"] = "".join(lines)[-TAIL:]
    return result


def _followed(
    command: Sequence[str], environment: dict[str, str], limit: float, log: TextIO
) -> tuple[list[str], int]:
    """The lines that a process printed, and its status; 124: it was ended, with all that it had started, after ``limit``
    seconds."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines: list[str] = []

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
            log.write(line)
            log.flush()

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = 124
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it may have started others
        process.wait()
        reader.join(LEAST)
    return lines, code


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


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
    figures: dict[str, Any] = {}
    keys = ("vs_peft", "vs_packed", "tokens_per_second", "mfu", "peak_gib", "kernels", "partial")
    for name in ("1b", "8b", "1b-all-linear", "forms"):
        result = results.get(name, {}).get("result")
        if result:
            figures[name] = {key: result[key] for key in keys if key in result}
    for name, key in (("hybrids", "layers"), ("experts", "ms")):
        result = results.get(name, {}).get("result")
        if result:
            figures[name] = result.get(key, result)
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
