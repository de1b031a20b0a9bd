"""`mlora plan` as a process that looks at a real model; what it refuses, `mlora run` refuses with the same words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_model import write_tiny_model

pytestmark = pytest.mark.integration

TASK = """\
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata: {{name: {name}}}
spec:
  baseModel: org/tiny
  lora: {{rank: {rank}, targetModules: [{modules}]}}
  dataset: {{uri: "{rows}"}}
  training: {{batchSize: 2, epochs: 2, learningRate: 1e-2, maxSeqLength: {longest}}}
  output: {{uri: "{folder}/out/{name}"}}
---
"""


def write(folder: Path, **tasks: dict[str, Any]) -> Path:
    rows = folder / "rows.jsonl"
    answers = ("She sold 24 clips." * times for times in (1, 2, 3, 4))
    rows.write_text("\n".join(json.dumps({"prompt": "How many?", "completion": one}) for one in answers))
    usual = {"rank": 4, "modules": "q_proj, v_proj", "longest": 128, "rows": rows.as_uri()}
    file = folder / "tasks.yaml"
    file.write_text(
        "".join(
            TASK.format(name=name, folder=folder.as_uri(), **{**usual, **own}) for name, own in tasks.items()
        )
    )
    return file


def mlora(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", "from mlora_operator.cli import main; main()", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


def test_rows_are_measured_and_misfits_named_with_their_figures(tmp_path: Path, tiny_model: Path) -> None:
    file = write(
        tmp_path,
        good={},
        wide={"rank": 33, "modules": "k_proj"},
        unknown={"modules": "c_attn"},
        long={"longest": 1024},
        absent={"rows": "file:///nowhere/rows.jsonl"},
    )
    place = f"org/tiny={tiny_model}"
    code, output, errors = mlora("plan", str(file), "--model", place, "--stages", "2", "-o", "json")
    assert (code, bool(output)) == (1, True), errors
    (pipeline,) = json.loads(output)["pipelines"]
    tasks = {one["name"]: one for one in pipeline["tasks"]}
    assert {name: (one["state"], one["reason"]) for name, one in tasks.items()} == {
        "good": ("Admitted", "Admitted"),
        "wide": ("Failed", "InvalidSpec"),
        "unknown": ("Failed", "UnknownTargetModule"),
        "long": ("Failed", "InvalidSpec"),
        "absent": ("Failed", "DatasetNotFound"),
    }
    assert (tasks["good"]["rowsRead"], tasks["good"]["totalSteps"]) == (4, 4)
    assert tasks["good"]["tokensPerStep"] < 2 * 128, "the rows' own lengths, not the longest that may be"
    assert tasks["good"]["rowSpread"] > 0
    assert [(one["firstLayer"], one["lastLayer"]) for one in pipeline["stages"]] == [(0, 1), (2, 3)]


def test_too_many_stages_are_refused_by_plan_and_at_once_by_run(tmp_path: Path) -> None:
    file = write(tmp_path, good={})
    short = write_tiny_model(tmp_path / "model", layers=1)
    model = ("--model", f"org/tiny={short}", "--stages", "2")
    refusal = "2 stages were asked for, but the model has 1 decoder layers"
    code, output, errors = mlora("plan", str(file), *model)
    assert (code, output) == (2, "")
    assert refusal in errors
    state = tmp_path / "state"
    code, _, _ = mlora("run", str(file), *model, "--state", str(state), "--timeout", "200")
    assert code == 1
    (log,) = state.glob("logs/*/rank-0.log")
    assert log.read_text().count(refusal) == 1, "another start would not change it"
