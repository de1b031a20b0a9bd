"""`mlora run` as a process with real workers, on a model that loads in no time; then `mlora fetch`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

TASK = """\
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata: {{name: {name}}}
spec:
  baseModel: org/tiny
  priority: {priority}
  lora: {{rank: {rank}, targetModules: [{modules}]}}
  dataset: {{inline: '{rows}'}}
  training: {{batchSize: 2, maxSteps: {steps}, learningRate: 1e-2, maxSeqLength: 128}}
  output: {{uri: "{folder}/{name}"}}
---
"""
ROW = json.dumps({"prompt": "How many clips?", "completion": "She sold 24 clips."})


def manifest(folder: Path, name: str, **changes: Any) -> str:
    # A blank line in a quoted YAML text is a line break.
    rows = f"{ROW}\n\n    {ROW}"
    fields = {"priority": 0, "rank": 4, "modules": "q_proj, v_proj", "rows": rows, "steps": 4, **changes}
    return TASK.format(name=name, folder=folder.as_uri(), **fields)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from mlora_operator.cli import main; main()", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(file: Path, model: Path, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, what was said as JSON, and standard error."""
    fixed = ("run", str(file), "--model", f"org/tiny={model}", "--output", "json", "--timeout", "240")
    done = subprocess.run(
        command(*fixed, *options), env=environment(), capture_output=True, text=True, timeout=300
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@dataclass(frozen=True)
class Trained:
    """A run that has ended: what it printed, where its adapters are, and the folder of its state."""

    code: int
    said: list[dict[str, Any]]
    errors: str
    out: Path
    state: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Trained:
    """Of three tasks on two real stages, one of which must fail."""
    folder = tmp_path_factory.mktemp("trained")
    file, out, state = folder / "tasks.yaml", folder / "out", str(folder / "s")
    file.write_text(
        manifest(out, "a", rank=8, modules="all-linear")
        + manifest(out, "b", priority=5)
        + manifest(out, "c", modules="qproj")
    )
    code, said, errors = run(file, tiny_model, "--stages", "2", "--threads", "1", "--state", state)
    return Trained(code, said, errors, out, state)


def test_two_tasks_train_on_two_real_stages_and_one_bad_one_fails(trained: Trained, tmp_path: Path) -> None:
    said = trained.said
    assert trained.code == 1, trained.errors
    results = {one["name"]: (one["result"], one["reason"]) for one in said[-1]["tasks"]}
    assert results == {
        "a": ("Succeeded", "AdapterUploaded"),
        "b": ("Succeeded", "AdapterUploaded"),
        "c": ("Failed", "UnknownTargetModule"),
    }
    assert {one["state"] for one in said if one.get("name") == "a"} >= {"Pending", "Succeeded"}
    assert not (trained.out / "c").exists()

    fetch = command("fetch", (trained.out / "a").as_uri(), "-d", str(tmp_path / "got"), "--output", "json")
    fetched = json.loads(subprocess.run(fetch, capture_output=True, text=True, check=True).stdout)
    assert (fetched["name"], fetched["step"], fetched["baseModel"]) == ("a", 4, "org/tiny")
    config = json.loads((tmp_path / "got" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (8, "org/tiny")


def test_a_finished_adapter_is_replaced_only_when_the_user_says_so(
    trained: Trained, tmp_path: Path, tiny_model: Path
) -> None:
    file, written = tmp_path / "tasks.yaml", trained.out / "b" / "manifest.json"
    file.write_text(manifest(trained.out, "b", priority=5))
    first = json.loads(written.read_text())
    code, said, _ = run(file, tiny_model, "--state", trained.state)
    assert (code, said[-1]["tasks"][0]["result"]) == (0, "Succeeded"), "the same run, continued"
    assert json.loads(written.read_text()) == first
    file.write_text(manifest(trained.out, "b", rank=8))
    code, said, _ = run(file, tiny_model)
    (task,) = said[-1]["tasks"]
    assert (code, task["result"], task["reason"]) == (1, "Failed", "OutputExists")
    assert json.loads(written.read_text()) == first
    code, said, errors = run(file, tiny_model, "--overwrite")
    assert code == 0, errors
    assert json.loads((trained.out / "b" / "adapter_config.json").read_text())["r"] == 8


def test_sigterm_ends_the_run_with_all_its_processes(tmp_path: Path, tiny_model: Path) -> None:
    file, state = tmp_path / "tasks.yaml", tmp_path / "s"
    file.write_text(manifest(tmp_path / "out", "a", steps=1_000_000))
    arguments = ("run", str(file), "--model", f"org/tiny={tiny_model}", "--state", str(state))
    process = subprocess.Popen(command(*arguments), env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(state.glob("logs/*/rank-0.log")) and time.monotonic() < deadline:
        time.sleep(0.2)
    # The log is opened a moment before its rank is started.
    while not (started := children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert started
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, "interrupted" in errors) == (130, True)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def children(parent: int) -> list[str]:
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
