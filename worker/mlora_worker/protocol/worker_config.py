"""How a rank is started. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
)

from mlora_worker.bounds import (
    Amount,
    Count,
    LocalPath,
    LongName,
    Port,
    Stages,
    Word,
)
from mlora_worker.protocol.message import EndpointUrl, FolderUri, Message
from mlora_worker.protocol.model import ModelSource
from mlora_worker.protocol.plan import Addressing, Checksums, Encryption, KmsKeyId

HUB_ENDPOINT = (
    "https://huggingface.co"  # where hf:// addresses lead, unless an administrator names another place
)


class WorkerConfig(Message):
    """Start configuration of every rank of a pipeline, as JSON in ``MLORA_WORKER_CONFIG``; the rank's own number is in
    ``MLORA_RANK``, or the trailing number of ``MLORA_POD_NAME``."""

    pipeline: LongName  # namespace/name, for logs
    model: ModelSource
    stages: Stages
    coordinator_host: LongName  # where rank 0 is reached by the other ranks
    http_port: Port = 8080
    link_port: Port = 29400  # descriptors and reports between ranks
    rendezvous_port: Port = 29500  # torch.distributed's store
    token_file: LocalPath
    tls_dir: LocalPath | None = (
        None  # holds tls.crt and tls.key, re-read when they change; None: all is plain
    )
    storage_endpoint: EndpointUrl | None = None  # of the model; its keys are files below storage_keys_dir
    storage_region: Word = "us-east-1"
    storage_addressing: Addressing = Addressing.AUTO
    storage_checksums: Checksums = Checksums.AUTO
    storage_server_side_encryption: Encryption | None = None
    storage_kms_key_id: KmsKeyId | None = None
    storage_keys_dir: LocalPath | None = (
        None  # holds AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, perhaps ca.crt, HF_TOKEN; re-read at each use
    )
    cache_dir: LocalPath = "/tmp/mlora"
    checkpoints_uri: FolderUri | None = (
        None  # with the model's keys; None: below each task's own output, with its keys
    )
    termination_seconds: Amount = 60  # between SIGTERM and the end, to write checkpoints
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # gloo lets several ranks share a GPU
    threads: Amount = 0  # per rank; 0: torch's default
    microbatch_tokens: Count = 4096  # most tokens of one microbatch; a longer single row travels alone
    recompute_activations: bool = False  # keep a layer's input alone; its forward runs again in the backward
    memory_budget: Count | None = (
        None  # bytes of each rank's allocations, base model included; None: what the device has
    )
    calibrate: bool = True  # measure a few made-up microbatches before the first task is let in
    measure_every: Count = 64  # of microbatches that are like former ones, one in so many is measured
    allow_file_uris: bool = False  # file:// datasets and outputs: `mlora run` only
    allowed_networks: Annotated[
        tuple[Word, ...], Field(max_length=1024)
    ] = ()  # CIDR: http(s) data sets may lie there though it is loopback, link-local, ...
    hub_endpoint: EndpointUrl = HUB_ENDPOINT
    model_cache_bytes: Amount = (
        100 * 2**30
    )  # of a remote model's weights that are kept below cache_dir; 0: none
    dataset_cache_bytes: Amount = 20 * 2**30  # of tokenised rows that are kept below cache_dir
    log_format: Literal["text", "json"] = "text"
    metrics_port: Port | None = None  # of each rank's /metrics, in a pod; None: there is none
