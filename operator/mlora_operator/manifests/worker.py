"""What a worker is told when it starts, and where it finds things. Pure."""

from __future__ import annotations

from typing import Literal

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.units import parse_bytes
from mlora_operator.manifests.owner import Owner
from mlora_operator.manifests.secret import TOKEN_KEY
from mlora_worker.protocol import HUB_ENDPOINT, ModelSource, WorkerConfig

HTTP_PORT = 8080
LINK_PORT = 29400
RENDEZVOUS_PORT = 29500

TOKEN_DIR = "/var/run/mlora/token"
TLS_DIR = "/var/run/mlora/tls"
STORAGE_KEYS_DIR = "/var/run/mlora/storage"
CACHE_DIR = "/cache"

TERMINATION_SECONDS = 100  # that ranks have to save what they have in hand
GRACE_SECONDS = TERMINATION_SECONDS + 20  # after which the kubelet kills them


def coordinator_host(owner: Owner) -> str:
    """DNS name of rank 0, through the headless Service."""
    return f"{owner.child}-0.{owner.child}.{owner.namespace}.svc"


def worker_config(
    owner: Owner,
    spec: LoRAPipelineSpec,
    log_format: Literal["text", "json"],
    *,
    allow_file_uris: bool,
    tls: bool = False,
    metrics_port: int | None = None,
) -> WorkerConfig:
    """The same for all ranks of a pipeline; a rank knows its number by its pod's name."""
    model, storage = spec.model, spec.storage
    return WorkerConfig(
        pipeline=f"{owner.namespace}/{owner.name}",
        model=ModelSource.model_validate(model.model_dump()),
        stages=spec.stages,
        coordinator_host=coordinator_host(owner),
        http_port=HTTP_PORT,
        link_port=LINK_PORT,
        rendezvous_port=RENDEZVOUS_PORT,
        token_file=f"{TOKEN_DIR}/{TOKEN_KEY}",
        tls_dir=TLS_DIR if tls else None,
        storage_endpoint=storage.endpoint,
        storage_region=storage.region,
        storage_addressing=storage.addressing,
        storage_checksums=storage.checksums,
        storage_server_side_encryption=storage.server_side_encryption,
        storage_kms_key_id=storage.kms_key_id,
        storage_keys_dir=STORAGE_KEYS_DIR if storage.secret_ref is not None else None,
        cache_dir=CACHE_DIR,
        checkpoints_uri=spec.checkpoints.uri,
        termination_seconds=TERMINATION_SECONDS,
        threads=spec.worker.threads,
        microbatch_tokens=spec.microbatch_tokens,
        recompute_activations=spec.recompute_activations,
        memory_budget=parse_bytes(spec.memory.budget) if spec.memory.budget else None,
        allow_file_uris=allow_file_uris,
        allowed_networks=spec.worker.allowed_networks,
        hub_endpoint=spec.worker.hub_endpoint or HUB_ENDPOINT,
        model_cache_bytes=parse_bytes(spec.worker.model_cache),
        log_format=log_format,
        metrics_port=metrics_port,
    )
