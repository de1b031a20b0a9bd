"""The Kustomize example, built by kubectl, and taken by the API server's schema."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from mlora_operator.local.manifests import Manifests, read_manifests
from tests.cluster.command import run
from tests.fixtures.kubectl import kubectl_program

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[2] / "examples" / "kustomize"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example with the file that is not in Git."""
    copy = shutil.copytree(EXAMPLE, tmp_path / "kustomize")
    shutil.copy(copy / "overlays/dev/s3.env.example", copy / "overlays/dev/s3.env")
    return Path(copy)


def build(folder: Path) -> Manifests:
    """What Kustomize makes of the folder; nothing of it is invalid."""
    found = read_manifests([(folder.name, run(kubectl_program(), "kustomize", folder))])
    assert [str(problem) for problem in found.problems] == []
    return found


def test_the_base_and_both_overlays_are_valid(example: Path) -> None:
    for folder in ("base", "overlays/dev", "overlays/prod"):
        found = build(example / folder)
        assert (len(found.tasks), len(found.pipelines)) == (1, 1)


def test_an_overlay_is_another_task_with_another_output(example: Path) -> None:
    (dev,), (prod,) = build(example / "overlays/dev").tasks, build(example / "overlays/prod").tasks
    assert (dev.place.namespace, dev.place.name, dev.spec.priority) == ("team-a-dev", "dev-support-bot", -10)
    assert (dev.spec.training.max_steps, dev.spec.lora.rank) == (20, 16)
    assert (prod.place.namespace, prod.place.name, prod.spec.priority) == ("team-a", "support-bot", 10)
    assert (prod.spec.lora.rank, prod.spec.lora.target_modules) == (32, ("all-linear",))
    assert dev.spec.output.uri != prod.spec.output.uri


def test_names_of_secrets_follow_and_images_are_set(example: Path) -> None:
    dev = build(example / "overlays/dev")
    (secret,) = dev.secrets
    assert secret.place.name == "dev-s3-credentials"
    for one in (dev.tasks[0], dev.pipelines[0]):
        assert one.spec.storage.secret_ref is not None
        assert one.spec.storage.secret_ref.name == secret.place.name
    (pipeline,) = build(example / "overlays/prod").pipelines
    assert pipeline.spec.worker.image == "registry.example.com/mlora-worker:0.1.0"


def test_all_that_the_workers_of_a_pipeline_name_is_followed(example: Path) -> None:
    """As in a pod: pull secrets, variables, volumes."""
    overlay = example / "overlays/workers"
    overlay.mkdir()
    worker = {
        "imagePullSecrets": [{"name": "keys"}],
        "env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "a"}}},
            {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "map", "key": "a"}}},
        ],
        "volumes": [
            {"name": "a", "secret": {"secretName": "keys"}},
            {"name": "b", "configMap": {"name": "map"}},
            {
                "name": "c",
                "projected": {"sources": [{"secret": {"name": "keys"}}, {"configMap": {"name": "map"}}]},
            },
            {"name": "d", "persistentVolumeClaim": {"claimName": "disk"}},
        ],
    }
    disk = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "disk"}, "spec": {}}
    (overlay / "disk.yaml").write_text(yaml.safe_dump(disk))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namePrefix": "x-",
        "resources": ["../../base", "disk.yaml"],
        "secretGenerator": [{"name": "keys", "literals": ["a=b"]}],
        "configMapGenerator": [{"name": "map", "literals": ["a=b"]}],
        "patches": [
            {
                "target": {"kind": "LoRAPipeline"},
                "patch": yaml.safe_dump([{"op": "add", "path": "/spec/worker", "value": worker}]),
            },
            {
                "target": {"kind": "LoRATask"},
                "patch": yaml.safe_dump(
                    [
                        {
                            "op": "add",
                            "path": "/spec/dataset/chatTemplateRef",
                            "value": {"name": "map", "key": "a"},
                        }
                    ]
                ),
            },
        ],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    found = build(overlay)
    keys = next(one.place.name for one in found.secrets)
    (map_,) = (place.name for place in found.others if place.kind == "ConfigMap")
    (pipeline,), (task,) = found.pipelines, found.tasks
    spec = pipeline.spec.worker
    assert spec.image_pull_secrets == ({"name": keys},)
    told = yaml.safe_dump([*spec.env, *spec.volumes])
    assert (told.count(keys), told.count(map_), told.count("claimName: x-disk")) == (3, 3, 1)
    assert task.spec.dataset.chat_template_ref is not None
    assert task.spec.dataset.chat_template_ref.name == map_


def test_a_generated_config_map_is_followed_with_its_hash(example: Path) -> None:
    overlay = example / "overlays/rows"
    overlay.mkdir()
    (overlay / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    patch = [
        {"op": "remove", "path": "/spec/dataset"},
        {
            "op": "add",
            "path": "/spec/dataset",
            "value": {"configMapRef": {"name": "rows", "key": "rows.jsonl"}},
        },
    ]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../../base"],
        "configMapGenerator": [{"name": "rows", "files": ["rows.jsonl"]}],
        "patches": [{"target": {"kind": "LoRATask"}, "patch": yaml.safe_dump(patch)}],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    found = build(overlay)
    (made,) = [place for place in found.others if place.kind == "ConfigMap"]
    assert made.name.startswith("rows-")
    reference = found.tasks[0].spec.dataset.config_map_ref
    assert reference is not None
    assert reference.name == made.name
