"""The two CustomResourceDefinitions, made from the pydantic models: one source of truth.

``python -m mlora_operator.api.crd DIRECTORY...`` writes them as files. ``crds/`` in the repository is made
so, and so is the copy that the chart installs; ``COPIES`` names both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from mlora_operator.api import GROUP, VERSION, pipeline, pipeline_status, task
from mlora_operator.api.rules import PIPELINE_RULES, TASK_RULES
from mlora_operator.api.schema import structural, with_rules

COPIES = ("crds", "charts/mlora-operator/files/crds")
_HEADER = f"# Made by `python -m mlora_operator.api.crd {' '.join(COPIES)}`; do not edit.\n"


def _column(
    name: str, path: str, description: str, type_: str = "string", *, wide: bool = False
) -> dict[str, Any]:
    """A printer column; ``wide`` ones are shown by ``kubectl get -o wide`` only."""
    column: dict[str, Any] = {"name": name, "type": type_, "jsonPath": path, "description": description}
    return column | ({"priority": 1} if wide else {})


_AGE = _column("Age", ".metadata.creationTimestamp", "Time since creation.", "date")

_TASK_COLUMNS = [
    _column("State", ".status.state", "The most relevant condition."),
    _column("Reason", ".status.reason", "Reason of the state."),
    _column("Priority", ".spec.priority", "Higher values are scheduled first.", "integer"),
    _column("Progress", ".status.progress", "Completed and total optimizer steps."),
    _column("Loss", ".status.loss", "Mean loss of the last step."),
    _column("ETA", ".status.eta", "Time to the last step, while the task trains."),
    _column("Base Model", ".spec.baseModel", "The base model.", wide=True),
    _column("Pipeline", ".status.pipeline", "The pipeline that serves the task.", wide=True),
    _column("Tokens/s", ".status.tokensPerSecond", "Tokens of this task per second.", wide=True),
    _column("Adapter", ".status.adapter.uri", "Address of the finished adapter.", wide=True),
    _AGE,
]

_PIPELINE_COLUMNS = [
    _column("Model", ".spec.model.name", "The base model."),
    _column("Stages", ".spec.stages", "Number of stages; each has one worker pod.", "integer"),
    _column("State", ".status.state", "Idle, Waiting, Starting, Ready, Stalled or Failed."),
    _column("Reason", '.status.conditions[?(@.type=="Ready")].reason', "Reason of the Ready condition."),
    _column("Ready", ".status.ready", "Worker pods that are ready, of all stages."),
    _column("Active", ".status.activeTasks", "Tasks that are training.", "integer"),
    _column("Waiting", ".status.waitingTasks", "Tasks that are waiting.", "integer"),
    _column("Update", ".status.update", "Pending: the workers are to be replaced."),
    _column(
        "Updating",
        ".status.updatingSince",
        "Time since tasks began to wait for workers with the changed spec.",
        "date",
        wide=True,
    ),
    _column("Dtype", ".spec.model.dtype", "Data type of the frozen weights.", wide=True),
    _column("Quantization", ".spec.model.quantization.type", "How the frozen matrices are kept.", wide=True),
    _AGE,
]


def task_crd() -> dict[str, Any]:
    return _definition(
        task.KIND,
        task.PLURAL,
        "lt",
        "One LoRA adapter to train on a frozen base model that it shares with other tasks.",
        with_rules(structural(task.LoRATaskSpec, defaults=True), TASK_RULES),
        _status(task.TaskStatus),
        _TASK_COLUMNS,
    )


def pipeline_crd() -> dict[str, Any]:
    return _definition(
        pipeline.KIND,
        pipeline.PLURAL,
        "lp",
        "One frozen base model, split over stages, on which many LoRATasks train at once.",
        with_rules(structural(pipeline.LoRAPipelineSpec, defaults=True), PIPELINE_RULES),
        _status(pipeline_status.PipelineStatus),
        _PIPELINE_COLUMNS,
    )


def files() -> dict[str, str]:
    """File name to content, for both resources."""
    definitions = (task_crd(), pipeline_crd())
    return {f"{GROUP}_{crd['spec']['names']['plural']}.yaml": _HEADER + _to_yaml(crd) for crd in definitions}


def _status(model: type[BaseModel]) -> dict[str, Any]:
    schema = structural(model, defaults=False)
    schema["description"] = "The state that the operator last observed. Only the operator writes it."
    # One entry a type, so that a server-side apply of one condition leaves the others.
    schema["properties"]["conditions"] |= {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }
    return schema


def _definition(
    kind: str,
    plural: str,
    short_name: str,
    description: str,
    spec: dict[str, Any],
    status: dict[str, Any],
    columns: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short_name],
                "categories": ["mlora"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": columns,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "description": description,
                            "required": ["spec"],
                            "properties": {
                                "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}"},
                                "kind": {"type": "string", "description": kind},
                                "metadata": {"type": "object"},
                                "spec": spec,
                                "status": status,
                            },
                        }
                    },
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    """No anchors: the file is read by people and by tools that know none."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class's signature
        return True


def _to_yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: python -m mlora_operator.api.crd DIRECTORY...", file=sys.stderr)
        return 2
    for directory in map(Path, arguments):
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files().items():
            (directory / name).write_text(content, encoding="utf-8")
            print(directory / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
