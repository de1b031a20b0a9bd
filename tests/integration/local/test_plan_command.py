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


# What Llama 3.1 70B says in its config.json.
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_70b_model_in_4_bits_fits_two_devices_of_48_gb_and_a_plain_one_does_not(
    tmp_path: Path, tiny_model: Path
) -> None:
    """From its configuration alone: there are no weights."""
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_text(json.dumps(LLAMA_70B))
    file = write(tmp_path, good={"longest": 256})
    asked = (
        "--model",
        f"org/tiny={model}",
        "--stages",
        "2",
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
        "--memory",
        "48G",
        "-o",
        "json",
    )
    weights = {}
    for kind, state in (("nf4", "Admitted"), ("none", "Rejected")):
        code, output, errors = mlora("plan", str(file), *asked, "--quantization", kind)
        assert (code, bool(output)) == (int(state != "Admitted"), True), errors
        (pipeline,) = json.loads(output)["pipelines"]
        assert [task["state"] for task in pipeline["tasks"]] == [state]
        assert pipeline["quantization"] == kind
        weights[kind] = sum(stage["weightBytes"] for stage in pipeline["stages"])
        assert all((stage["neededBytes"] <= stage["allowedBytes"]) for stage in pipeline["stages"]) is (
            kind == "nf4"
        )
    assert weights["none"] > 140e9
    assert weights["nf4"] < 40e9
