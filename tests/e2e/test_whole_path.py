"""From ``kubectl apply`` to an adapter that PEFT loads; bad input, lost pods, idle workers; all of it real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import MODEL, OPERATOR_NAMESPACE, TASK_NAMESPACE, WholePath
from tests.fixtures.release import secret

pytestmark = pytest.mark.e2e


def test_tasks_become_adapters_that_peft_loads(path: WholePath, tiny_model: Path, tmp_path: Path) -> None:
    shapes: dict[str, dict[str, Any]] = {
        "small": {"lora": {"rank": 4, "alpha": 8, "targetModules": ["q_proj", "v_proj"]}, "priority": 5},
        "1st.digit-and-dot": {"lora": {"rank": 8, "alpha": 8, "targetModules": ["q_proj", "k_proj", "v_proj", "o_proj"]}},
        "all": {"lora": {"rank": 2, "alpha": 4, "dropout": 0.1, "targetModules": ["all-linear"]}},
    }  # fmt: skip
    for name, spec in shapes.items():
        path.apply(name, **spec)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    for name, spec in shapes.items():
        task = path.wait(name, "Succeeded")
        status = task["status"]
        assert (status["state"], status["progress"], status["step"]) == ("Succeeded", "5/5", 5)
        assert status["data"]["rows"] == status["data"]["used"] == 16
        assert float(status["loss"]) > 0
        target = tmp_path / name
        fetched = path.mlora(
            "fetch", name, "-n", TASK_NAMESPACE, "-d", str(target), "--endpoint", path.store.endpoint
        )
        assert fetched.returncode == 0, fetched.stderr
        config = json.loads((target / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == MODEL
        assert config["r"] == spec["lora"]["rank"]
        tuned = PeftModel.from_pretrained(model, str(target), adapter_name=name.replace(".", "-"))
        ups = [weight for key, weight in tuned.named_parameters() if "lora_B" in key]
        assert ups
        assert all(bool(torch.count_nonzero(weight)) for weight in ups)
        model = tuned.unload()
    [pipeline] = path.system.json("get", "lorapipelines")["items"]
    assert pipeline["spec"]["model"]["name"] == MODEL, "the operator made it from the catalogue"
    listed = path.tasks("get", "lt")
    assert listed.split("\n")[0].split()[:3] == ["NAME", "STATE", "REASON"]
    assert "Succeeded" in path.tasks("describe", "lt", "small")


BAD: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # spec, the condition that says it, its reason, a word of its message
    "no-model": ({"baseModel": "Org/Unknown"}, "Accepted", "NoPipelineForModel", MODEL),
    "no-object": ({"dataset": {"uri": "s3://datasets/not/there.jsonl"}}, "Failed", "DatasetNotFound", "not/there.jsonl"),
    "bad-row": ({"dataset": {"inline": '{"prompt": "a", "completion": "b"}\n{"p'}}, "Failed", "InvalidRow", "line 2"),
    "bad-module": ({"lora": {"targetModules": ["q_proj", "qproj"]}}, "Failed", "UnknownTargetModule", "gate_proj"),
    "wrong-key": ({"storage": {"secretRef": {"name": "wrong-key"}}}, "Failed", "AccessDenied", "adapters"),
    "file": ({"dataset": {"uri": "file:///etc/passwd"}}, "Accepted", "InvalidSpec", "file://"),
}  # fmt: skip


def test_bad_input_says_what_to_do_and_nobody_else_suffers(path: WholePath) -> None:
    path.tasks.apply(secret("wrong-key", path.store.access_key, "not-the-key"))
    for name, (spec, *_) in BAD.items():
        storage = {"endpoint": path.store.inside, "secretRef": {"name": "s3-credentials"}} | spec.get(
            "storage", {}
        )
        path.apply(name, **{**spec, "storage": storage})
    path.apply("good-beside-bad")
    path.wait("good-beside-bad", "Succeeded")
    for name, (_, kind, reason, words) in BAD.items():
        path.until(f"{name} is {kind}", lambda name=name, kind=kind: kind in path.conditions(name))  # type: ignore[misc]
        condition = path.conditions(name)[kind]
        assert condition["status"] == ("True" if kind == "Failed" else "False"), (name, condition)
        assert condition["reason"] == reason, (name, condition)
        assert words in condition["message"], (name, condition)
        assert path.objects(name) == [], "nothing below the output prefix"
    text = json.dumps(path.tasks.json("get", "loratasks")) + path.explain()
    assert "not-the-key" not in text
    assert path.store.secret_key not in text, "keys never show in status or logs"


def test_a_late_secret_is_picked_up_by_itself(path: WholePath) -> None:
    storage = {"endpoint": path.store.inside, "secretRef": {"name": "late"}}
    path.apply("waits-for-secret", storage=storage)
    path.until(
        "SecretNotFound",
        lambda: path.conditions("waits-for-secret").get("Accepted", {}).get("status") == "False",
    )
    condition = path.conditions("waits-for-secret")["Accepted"]
    assert condition["reason"] == "SecretNotFound"
    assert "late" in condition["message"]
    path.tasks.apply(secret("late", path.store.access_key, path.store.secret_key))
    path.wait("waits-for-secret", "Succeeded")


def test_a_restarted_operator_and_a_killed_worker_pod_cost_time_but_no_task_and_no_bit(
    path: WholePath,
) -> None:
    """The pod is killed while one operator gives way to the next, so neither has to have seen all of it. No neighbour
    trains, so that the microbatches, and with them all bits, are those of the undisturbed task."""
    rows = "\n".join(
        json.dumps({"prompt": f"How much is {i}?", "completion": f"It is {i}."}) for i in range(16)
    )
    training = {"batchSize": 4, "maxSteps": 400, "maxSeqLength": 128, "checkpointEverySteps": 50}
    spec = {"dataset": {"inline": rows}, "training": training}
    path.apply("undisturbed", **spec)
    path.wait("undisturbed", "Succeeded", seconds=600)
    path.apply("survivor", **spec)
    path.until("some steps", lambda: path.task("survivor").get("status", {}).get("step", 0) >= 1)
    victim = path.pods()[-1]["metadata"]["name"]
    path.system("rollout", "restart", "deployment")
    path.system("delete", "pod", victim, "--grace-period=0", "--force")
    path.system("rollout", "status", "deployment", "--timeout=120s")
    status = path.wait("survivor", "Succeeded", seconds=600)["status"]
    assert (status["progress"], status["restarts"]) == ("400/400", 1)
    [pipeline] = path.system.json("get", "lorapipelines")["items"]
    assert pipeline["status"].get("restarts") is None, "a pod that was deleted is no failure of the workers"
    assert path.weights("survivor") == path.weights("undisturbed")


def test_changed_workers_do_not_keep_others_waiting_for_what_trains(path: WholePath) -> None:
    """It is interrupted, and goes on from where it was."""
    path.apply("interrupted", training={"batchSize": 4, "maxSteps": 100000, "maxSeqLength": 128})
    path.until("some steps", lambda: path.task("interrupted").get("status", {}).get("step", 0) >= 5)
    [name] = [one["metadata"]["name"] for one in path.system.json("get", "lorapipelines")["items"]]

    def change(hold_back: str, variables: dict[str, str]) -> None:
        env = [{"name": name, "value": value} for name, value in variables.items()]
        spec = {"scheduling": {"holdBack": hold_back}, "worker": {"env": env}}
        path.system("patch", "lorapipeline", name, "--type=merge", "--patch", json.dumps({"spec": spec}))

    change("5s", {"CHANGED": "yes"})
    try:
        path.apply("waits-for-change")
        step = path.task("interrupted")["status"]["step"]
        path.wait("waits-for-change", "Succeeded")
        status = path.task("interrupted")["status"]
        assert (status["state"], status["step"] >= step) == ("Training", True)
        for pod in path.pods():
            [container] = pod["spec"]["containers"]
            assert {"name": "CHANGED", "value": "yes"} in container["env"]
        [pipeline] = path.system.json("get", "lorapipelines")["items"]
        assert pipeline["status"].get("restarts") is None, "it is no failure of the workers"
    finally:
        path.tasks("delete", "loratask", "interrupted", "--timeout=30s")
        change("10m", {})


def test_idle_workers_go_and_finished_tasks_never_run_again(path: WholePath) -> None:
    path.apply("only-once")
    path.wait("only-once", "Succeeded")
    manifest = f"{TASK_NAMESPACE}/only-once/manifest.json"
    written = path.store.client.head_object(Bucket="adapters", Key=manifest)["LastModified"]
    path.until("no worker is left", lambda: path.pods() == [], seconds=180)
    [pipeline] = path.system.json("get", "lorapipelines")["items"]
    assert pipeline["status"]["state"] == "Idle"
    path.system("rollout", "restart", "deployment")
    path.system("rollout", "status", "deployment", "--timeout=120s")
    path.apply("after-restart")
    path.wait("after-restart", "Succeeded")
    assert path.store.client.head_object(Bucket="adapters", Key=manifest)["LastModified"] == written
    assert path.task("only-once")["metadata"].get("finalizers", []) == []


def test_a_deleted_task_leaves_and_its_neighbour_goes_on(path: WholePath) -> None:
    training = {"batchSize": 4, "maxSteps": 150, "maxSeqLength": 128}
    path.apply("goes", training={**training, "maxSteps": 100000})
    path.apply("stays", training=training)
    path.wait("stays", "Running")
    path.wait("goes", "Running")
    path.tasks("delete", "loratask", "goes", "--timeout=30s")
    path.wait("stays", "Succeeded")
    # What it had saved until then stays, so that it would resume if someone applied it again; an adapter never comes.
    published = [key for key in path.objects("goes") if "/checkpoints/" not in key]
    assert published == []


def test_another_token_and_certificate_reach_workers_that_train(path: WholePath) -> None:
    """Their Secrets are deleted. Until the kubelet has brought the new ones, the former ones hold on both sides."""
    path.apply("certified", training={"batchSize": 4, "maxSteps": 100000, "maxSeqLength": 128})
    path.wait("certified", "Running")
    before = [pod["metadata"]["uid"] for pod in path.pods()]
    assert {pod["metadata"]["annotations"]["mlora.dev/scheme"] for pod in path.pods()} == {"https"}
    [first] = [pod["metadata"]["name"] for pod in path.pods() if pod["metadata"]["name"].endswith("-0")]

    def certificates() -> int:
        return path.system("logs", first).count("connections are encrypted with the certificate")

    def taken_without_a_gap() -> bool:
        assert path.conditions("certified")["Running"]["status"] == "True"
        return certificates() == 2

    assert certificates() == 1
    path.system("delete", "secrets", "-l", "app.kubernetes.io/managed-by=mlora-operator")
    try:
        path.until("the coordinator has the new certificate", taken_without_a_gap, seconds=240)
        step = path.task("certified")["status"]["step"]
        path.until("the operator hears of it", lambda: path.task("certified")["status"]["step"] > step)
        assert path.conditions("certified")["Running"]["status"] == "True"
        assert [pod["metadata"]["uid"] for pod in path.pods()] == before
    finally:
        path.tasks("delete", "loratask", "certified", "--timeout=60s")


def test_workers_hold_no_cluster_credential(path: WholePath) -> None:
    path.apply("for-its-pod")
    path.until("a worker runs", lambda: any(pod["status"].get("phase") == "Running" for pod in path.pods()))
    for pod in path.pods():
        assert pod["spec"]["automountServiceAccountToken"] is False
        mounts = [
            mount["mountPath"]
            for container in pod["spec"]["containers"]
            for mount in container["volumeMounts"]
        ]
        assert not any("serviceaccount" in mount for mount in mounts)
        assert pod["metadata"]["namespace"] == OPERATOR_NAMESPACE
    path.wait("for-its-pod", "Succeeded")
