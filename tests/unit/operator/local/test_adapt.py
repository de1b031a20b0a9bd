"""Manifests written for a cluster become a world on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlora_operator.local.adapt import InvalidRun, RunInputs, RunOptions, adapt, model_uri
from mlora_operator.local.machine import Machine, this_machine
from mlora_operator.local.manifests import read_manifests
from mlora_operator.reconcile.state.snapshot import Key

TASK = """\
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata: {name: a, namespace: team}
spec:
  baseModel: m
  dataset: {uri: s3://d/a}
  output: {uri: s3://o/a}
  storage: {endpoint: "http://s3.storage:8333", secretRef: {name: keys}}
---
"""
PIPELINE = """\
apiVersion: mlora.dev/v1alpha1
kind: LoRAPipeline
metadata: {name: p}
spec:
  model: {name: m, uri: s3://models/m, dtype: float16}
  stages: 4
  storage: {endpoint: "http://s3.storage:8333"}
---
"""
SECRET = "apiVersion: v1\nkind: Secret\nmetadata: {name: keys, namespace: team}\nstringData: {a: b}\n"
LAPTOP = Machine(cpus=8, memory_bytes=16 << 30)
WITH_GPUS = Machine(cpus=8, memory_bytes=16 << 30, gpus=("0", "1"))


def world(text: str, machine: Machine = LAPTOP, **wishes: Any) -> RunInputs:
    return adapt(read_manifests([("f.yaml", text)]), RunOptions(**wishes), machine)


def test_a_model_named_on_the_command_line_is_offered_like_a_catalogues() -> None:
    (model,) = world(TASK, models={"m": "file:///models/m"}, stages=2).settings.models
    assert (model.name, model.uri, model.stages) == ("m", "file:///models/m", 2)
    assert model.worker.threads == 4
    assert model.memory.budget == str(8 << 30)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_user_may_say_that_adapters_are_replaced(overwrite: bool) -> None:
    (task,) = world(TASK, models={"m": "file:///models/m"}, overwrite=overwrite).tasks
    assert task["spec"]["output"]["overwrite"] is overwrite


def test_without_a_gpu_the_weights_are_float32_and_with_one_bfloat16() -> None:
    def dtype(machine: Machine, **wishes: Any) -> str:
        return world(TASK, machine, models={"m": "file:///m"}, **wishes).settings.models[0].dtype

    assert dtype(LAPTOP) == "float32"
    assert dtype(WITH_GPUS) == "bfloat16"
    assert dtype(WITH_GPUS, device="cpu") == "float32"
    assert dtype(LAPTOP, dtype="bfloat16") == "bfloat16"


def test_ranks_on_gpus_have_the_gpus_memory() -> None:
    (model,) = world(TASK, WITH_GPUS, models={"m": "file:///m"}).settings.models
    assert model.memory.budget is None


def test_a_pipeline_of_the_manifests_serves_its_model_as_it_says() -> None:
    made = world(TASK + PIPELINE)
    (pipeline,) = made.pipelines
    assert pipeline["spec"]["model"] == {
        "name": "m",
        "uri": "s3://models/m",
        "dtype": "float16",
        "quantization": {"type": "none", "doubleQuantization": True},
    }
    assert (pipeline["spec"]["stages"], pipeline["spec"]["worker"]["threads"]) == (4, 2)
    assert made.settings.models == ()


def test_options_override_a_pipeline_of_the_manifests() -> None:
    wishes = {"models": {"m": "file:///m"}, "stages": 2, "dtype": "float32", "threads": 1, "restarts": 7}
    (pipeline,) = world(TASK + PIPELINE, **wishes).pipelines
    spec = pipeline["spec"]
    assert (spec["model"]["uri"], spec["model"]["dtype"], spec["stages"]) == ("file:///m", "float32", 2)
    assert (spec["worker"]["threads"], spec["restarts"]["limit"]) == (1, 7)
    (model,) = world(TASK, models={"m": "file:///m"}, restarts=0).settings.models
    assert model.restarts.limit == 0


def test_the_wished_quantisation_is_that_of_every_pipeline() -> None:
    (pipeline,) = world(TASK + PIPELINE, models={"m": "file:///m"}, quantization="int8").pipelines
    assert pipeline["spec"]["model"]["quantization"]["type"] == "int8"
    (model,) = world(TASK, models={"m": "file:///m"}, quantization="nf4").settings.models
    assert model.pipeline_spec().model.quantization.label == "nf4, double"
    (model,) = world(TASK, models={"m": "file:///m"}).settings.models
    assert model.quantization.type == "none"


def test_the_given_endpoint_replaces_every_other() -> None:
    made = world(TASK + PIPELINE, s3_endpoint="http://127.0.0.1:8333")
    for one in (*made.tasks, *made.pipelines):
        assert one["spec"]["storage"]["endpoint"] == "http://127.0.0.1:8333"
    (model,) = world(TASK, models={"m": "s3://b/m"}, s3_endpoint="http://x:1").settings.models
    assert model.storage.endpoint == "http://x:1"


def test_objects_are_as_the_api_server_would_store_them() -> None:
    (task,) = world(TASK, models={"m": "file:///m"}).tasks
    assert task["metadata"] == {"namespace": "team", "name": "a"}
    assert task["spec"]["training"]["batchSize"] == 8
    assert "maxSteps" not in task["spec"]["training"]


def test_secrets_are_found_by_namespace_and_not_shown() -> None:
    made = world(TASK + SECRET, models={"m": "file:///m"})
    assert made.secrets == {Key("team", "keys"): {"a": "b"}}
    assert "'b'" not in repr(made)


def test_files_may_be_read_and_written_here() -> None:
    assert world(TASK, models={"m": "file:///m"}).settings.allow_file_uris


def test_a_model_that_lies_nowhere_is_asked_for() -> None:
    with pytest.raises(InvalidRun, match=r"f\.yaml:1: LoRATask/a: the location of m is not known"):
        world(TASK, models={"other": "file:///m"})


def test_without_a_task_there_is_no_run() -> None:
    with pytest.raises(InvalidRun, match="no LoRATask"):
        world(PIPELINE)


def test_a_models_place_may_be_a_relative_folder(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "config.json").touch()
    assert model_uri("my model", tmp_path) == f"{tmp_path.as_uri()}/my%20model"
    assert model_uri("s3://b/m", tmp_path) == "s3://b/m"
    with pytest.raises(InvalidRun, match=r"config\.json is missing"):
        model_uri("elsewhere", tmp_path)


def test_ranks_share_processors_and_gpus() -> None:
    assert [LAPTOP.threads_of(stages) for stages in (1, 2, 3, 100)] == [8, 4, 2, 1]
    assert [WITH_GPUS.gpu_of(rank) for rank in range(3)] == ["0", "1", "0"]
    assert LAPTOP.gpu_of(0) is None


def test_the_machine_is_read_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1048576\n")
    found = this_machine({}, tmp_path)
    assert (found.gpus, found.memory_bytes) == (("0", "2", "10"), 1048576)
    assert this_machine({"CUDA_VISIBLE_DEVICES": "3, GPU-abc"}, tmp_path).gpus == ("3", "GPU-abc")
    assert this_machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).gpus == ()
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert this_machine({}, tmp_path).memory_bytes > 1048576
