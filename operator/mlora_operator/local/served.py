"""Which pipeline of the manifests, or of the command line, serves which task: the operator's own rule, before anything
runs. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mlora_operator.api.meta import timestamp
from mlora_operator.local.adapt import RunInputs
from mlora_operator.manifests.pipeline import pipeline_manifest
from mlora_operator.reconcile.admission.admit import ordered
from mlora_operator.reconcile.assignment.eligibility import accept
from mlora_operator.reconcile.assignment.priority_bounds import too_high
from mlora_operator.reconcile.state.acceptance import Acceptance
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.decode import config_maps_wanted, read_pipeline, read_task, secrets_wanted
from mlora_operator.reconcile.state.references import ACCESS_KEY, SECRET_KEY
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, SecretData, Snapshot, Task


@dataclass(frozen=True, slots=True)
class Served:
    pipeline: Pipeline
    tasks: tuple[Task, ...]  # in the scheduler's order


@dataclass(frozen=True, slots=True)
class Service:
    """``missing``: Secrets that objects name and the files do not hold. A cluster may well have them."""

    served: tuple[Served, ...]
    unserved: tuple[tuple[Task, Cause], ...]
    secrets: dict[Key, SecretData] = field(repr=False)
    missing: frozenset[Key]


def service(world: RunInputs, now: datetime) -> Service:
    """Pipelines of the catalogue are made where a task needs one, as the operator would."""
    tasks = tuple(
        read_task(_created(raw, now), allow_file_uris=world.settings.allow_file_uris) for raw in world.tasks
    )
    pipelines = tuple(read_pipeline(_created(raw, now)) for raw in world.pipelines)
    wanted = secrets_wanted(tasks, pipelines)
    missing = frozenset(key for key in wanted if key not in world.secrets)
    unknown: SecretData = {ACCESS_KEY: "unknown", SECRET_KEY: "unknown"}

    def accepted(pipelines: tuple[Pipeline, ...]) -> list[tuple[Task, Acceptance]]:
        snapshot = Snapshot(
            tasks=tasks,
            pipelines=pipelines,
            secrets={key: world.secrets.get(key, unknown) for key in wanted},
            config_maps=dict.fromkeys(config_maps_wanted(tasks)),
            namespace_labels={
                task.key.namespace: {"kubernetes.io/metadata.name": task.key.namespace} for task in tasks
            },
        )
        rights = world.settings.rights
        found = ((task, accept(task, snapshot, world.settings.models, rights)) for task in tasks)
        return [
            (task, one if (cause := too_high(task, one, rights)) is None else Acceptance(cause))
            for task, one in found
        ]

    made = {one.wanted.name: one.wanted for _, one in accepted(pipelines) if one.wanted is not None}
    pipelines += tuple(
        read_pipeline(_created(pipeline_manifest(model, world.settings.namespace), now))
        for model in made.values()
    )
    decided = accepted(pipelines)
    return Service(
        served=tuple(
            Served(
                pipeline,
                ordered(
                    (task for task, one in decided if one.pipeline == pipeline), pipeline.spec.scheduling
                ),
            )
            for pipeline in pipelines
            if pipeline.spec is not None
        ),
        unserved=tuple((task, one.cause) for task, one in decided if one.pipeline is None),
        secrets={key: world.secrets[key] for key in wanted - missing},
        missing=missing,
    )


def _created(raw: dict[str, Any], now: datetime) -> dict[str, Any]:
    """As the API server would store it. All are made in the same second, as by one `kubectl apply`."""
    meta = raw["metadata"]
    uid = f"{raw['kind']}/{meta['namespace']}/{meta['name']}"
    return {**raw, "metadata": {**meta, "uid": uid, "creationTimestamp": timestamp(now), "generation": 1}}
