"""The world of a local run behind the ports of the reconcile loop: files and processes, no API server."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlora_operator.api import conditions
from mlora_operator.api import pipeline as lorapipeline
from mlora_operator.api import task as loratask
from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.units import parse_bytes
from mlora_operator.local.adapt import RunInputs
from mlora_operator.local.fits import beside_models, recall, remember
from mlora_operator.local.machine import Machine
from mlora_operator.local.objects import LocalObjects
from mlora_operator.local.ranks import HOST, TERM_GRACE, Ports, RankGroup
from mlora_operator.manifests.names import child_name, digest
from mlora_operator.reconcile import ports
from mlora_operator.reconcile.state.decision import DesiredWorkers, Event, Manifest
from mlora_operator.reconcile.state.snapshot import Key, Pipeline, Pod, SecretData, Task
from mlora_worker.protocol import HUB_ENDPOINT, ModelSource, WorkerConfig


@dataclass(frozen=True, slots=True)
class LocalEnvironment:
    """Where a run keeps its things. ``private`` holds keys and tokens, is only ours, and goes when it ends."""

    state: Path
    private: Path
    cache: Path
    environment: Mapping[str, str]  # of the ranks
    machine: Machine
    command: Sequence[str]


class LocalCluster:
    """``reconcile.ports.Cluster`` on this machine.

    ``on_task`` is told each task after its status changed, ``on_event`` each event, ``wake`` that the loop has
    something to look at.
    """

    def __init__(
        self,
        world: RunInputs,
        objects: LocalObjects,
        surroundings: LocalEnvironment,
        *,
        on_task: Callable[[dict[str, Any]], None],
        on_event: Callable[[Event], None],
    ) -> None:
        self._world = world
        self._objects = objects
        self._around = surroundings
        self._on_task = on_task
        self._on_event = on_event
        self._groups: dict[Key, RankGroup] = {}
        self._tokens: dict[Key, str] = {}
        self._fits = beside_models(surroundings.cache)
        for raw in objects.of_kind(lorapipeline.KIND):
            self._recall(Key(raw["metadata"]["namespace"], raw["metadata"]["name"]))
        self.wake: Callable[[], None] = lambda: None

    @property
    def given_up(self) -> Mapping[Key, str]:
        """Pipelines whose ranks are not started any more, with the reason: the reconcile loop's, or the machine's."""
        told = {}
        for raw in self._objects.of_kind(lorapipeline.KIND):
            status, meta = raw.get("status", {}), raw["metadata"]
            if status.get("givenUp") is not None:
                ready = next(one for one in status["conditions"] if one["type"] == conditions.READY)
                told[Key(meta["namespace"], meta["name"])] = ready["message"]
        return told | {key: one.given_up for key, one in self._groups.items() if one.given_up is not None}

    def endpoints(self) -> Mapping[Key, ports.Endpoint]:
        """Of the coordinators of all pipelines whose ranks run, by the pipeline's key."""
        return {
            key: ports.Endpoint(f"http://{HOST}:{one.ports.http}", self._tokens[key])
            for key, one in self._groups.items()
            if one.group.pods
        }

    async def stop(self) -> None:
        """End all ranks."""
        for group in self._groups.values():
            await group.stop()

    # --- what is ---

    def objects(self) -> ports.ClusterObjects:
        return ports.ClusterObjects(
            tasks=self._objects.of_kind(loratask.KIND),
            pipelines=self._objects.of_kind(lorapipeline.KIND),
            groups={key: one.group for key, one in self._groups.items()},
        )

    def revision(self, pipeline: Pipeline) -> str:
        assert pipeline.spec is not None
        spec = pipeline.spec.model_dump(
            mode="json",
            by_alias=True,
            exclude={
                "allowed_namespaces",
                "namespace_limits",
                "idle_timeout",
                "start_timeout",
                "stall_timeout",
                "restarts",
                "scheduling",
            },
        )
        return digest(spec)

    def coordinator_url(self, pipeline: Pipeline, scheme: str) -> str:
        """On loopback, where nobody else listens, nothing is encrypted."""
        del scheme
        return f"http://{HOST}:{self._groups[pipeline.key].ports.http}"

    async def read_secret(self, key: Key) -> SecretData | None:
        return self._world.secrets.get(key)

    async def read_config_map(self, key: Key) -> Mapping[str, str] | None:
        """There are none without a cluster: the task says so."""
        del key
        return None

    async def read_token(self, pipeline: Pipeline) -> str | None:
        return self._tokens.get(pipeline.key)

    async def read_trust(self, pipeline: Pipeline) -> None:
        """Nothing is encrypted."""

    async def read_namespace_labels(self, namespace: str) -> Mapping[str, str]:
        return {"kubernetes.io/metadata.name": namespace}

    # --- what shall be ---

    async def apply_pipeline(self, manifest: Manifest) -> None:
        self._objects.apply(manifest)
        meta = manifest["metadata"]
        self._recall(Key(meta["namespace"], meta["name"]))
        self.wake()

    async def delete_pipeline(self, pipeline: Pipeline) -> None:
        """One machine has no replicas (``adapt``)."""

    async def apply_workers(self, workers: DesiredWorkers) -> None:
        key = workers.pipeline.key
        if key not in self._groups:
            self._groups[key] = self._make_group(workers.pipeline)
        self._groups[key].resize(workers.replicas)

    async def delete_pod(self, pod: Pod) -> None:
        for group in self._groups.values():
            group.kill(pod.uid)

    async def delete_task(self, task: Task) -> None:
        """The record of a local run stays."""

    async def patch_task_status(self, task: Task, patch: Manifest) -> None:
        self._on_task(self._objects.patch_status(loratask.KIND, task.key, task.uid, patch))

    async def patch_pipeline_status(self, pipeline: Pipeline, patch: Manifest) -> None:
        now = self._objects.patch_status(lorapipeline.KIND, pipeline.key, pipeline.uid, patch)
        if "memory" in patch:
            remember(PipelineStatus.model_validate(now["status"]), self._fits)
        if "givenUp" in patch:
            self.wake()

    async def emit_event(self, event: Event) -> None:
        self._on_event(event)

    def _recall(self, key: Key) -> None:
        recall(self._objects, key, self._fits, self._around.machine, self._world.device)

    # --- one pipeline's ranks ---

    def _make_group(self, pipeline: Pipeline) -> RankGroup:
        name = child_name(pipeline.key.name)
        private = self._around.private / f"{pipeline.key.namespace}.{name}"
        self._tokens[pipeline.key] = secrets.token_urlsafe(32)
        _write_private(private, {"token": self._tokens[pipeline.key]})
        keys_dir = self._write_keys(pipeline, private / "keys")

        def configure(chosen: Ports) -> WorkerConfig:
            return self._worker_config(pipeline, chosen, private / "token", keys_dir)

        return RankGroup(
            key=Key(pipeline.key.namespace, name),
            configure=configure,
            revision=self.revision(pipeline),
            machine=self._around.machine,
            logs=self._around.state / "logs" / f"{pipeline.key.namespace}.{name}",
            environment=self._around.environment,
            on_change=lambda: self.wake(),
            command=self._around.command,
        )

    def _write_keys(self, pipeline: Pipeline, folder: Path) -> Path | None:
        """The keys of the model's store as files, as a pod would have its Secret mounted."""
        assert pipeline.spec is not None
        reference = pipeline.spec.storage.secret_ref
        if reference is None:
            return None
        _write_private(folder, self._world.secrets.get(Key(pipeline.key.namespace, reference.name), {}))
        return folder

    def _worker_config(
        self, pipeline: Pipeline, chosen: Ports, token_file: Path, keys_dir: Path | None
    ) -> WorkerConfig:
        spec, machine = pipeline.spec, self._around.machine
        assert spec is not None
        crowded = self._world.device != "cpu" and 0 < len(machine.gpus) < spec.stages
        return WorkerConfig(
            pipeline=str(pipeline.key),
            model=ModelSource.model_validate(spec.model.model_dump()),
            stages=spec.stages,
            coordinator_host=HOST,
            http_port=chosen.http,
            link_port=chosen.link,
            rendezvous_port=chosen.rendezvous,
            token_file=str(token_file),
            storage_endpoint=spec.storage.endpoint,
            storage_region=spec.storage.region,
            storage_keys_dir=str(keys_dir) if keys_dir is not None else None,
            cache_dir=str(self._around.cache),
            checkpoints_uri=spec.checkpoints.uri,
            termination_seconds=int(TERM_GRACE) - 1,
            device=self._world.device,
            backend="gloo" if crowded else "auto",
            threads=spec.worker.threads,
            microbatch_tokens=spec.microbatch_tokens,
            recompute_activations=spec.recompute_activations,
            memory_budget=parse_bytes(spec.memory.budget) if spec.memory.budget else None,
            allow_file_uris=True,
            allowed_networks=("0.0.0.0/0", "::/0"),  # user and worker are one and the same
            hub_endpoint=spec.worker.hub_endpoint or HUB_ENDPOINT,
            model_cache_bytes=parse_bytes(spec.worker.model_cache),
        )


def _write_private(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, content in files.items():
        file = folder / name
        file.touch(mode=0o600)
        file.write_text(content, encoding="utf-8")
