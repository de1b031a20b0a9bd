"""What both kinds of rank are made of: engine, links between stages, ports, metrics."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from mlora_worker.coordinator.http.server import serve_in_thread
from mlora_worker.coordinator.metrics import Meter, NullMeter, PipelineMetrics, RankMetrics, metrics_app
from mlora_worker.model.stage import Stage
from mlora_worker.pipeline.budget import limit_memory
from mlora_worker.pipeline.calibrate import calibrate
from mlora_worker.pipeline.listening import stay_on_loopback
from mlora_worker.pipeline.mailbox import Mailbox
from mlora_worker.pipeline.metered import MeteredEngine, OnSample, Sampling
from mlora_worker.pipeline.trace import SpanRecorder
from mlora_worker.pipeline.transport import Backend, Transport, rendezvous
from mlora_worker.protocol import (
    Report,
    WorkerConfig,
)
from mlora_worker.runtime.tls import server_context
from mlora_worker.storage.artifacts.aside import Aside
from mlora_worker.stream.turns import Turns


def tls_of(config: WorkerConfig) -> ssl.SSLContext | None:
    """How the HTTP port is encrypted, and on rank 0 the links; None: not at all. Raises ``CannotServe``."""
    return (
        server_context(Path(config.tls_dir), config.coordinator_host) if config.tls_dir is not None else None
    )


def serve_metrics(
    config: WorkerConfig, rank: int, recorder: SpanRecorder, report: Callable[[], Report | None] | None
) -> Meter:
    """Where the configuration names a port. ``report``: the coordinator's report, which rank 0 alone has."""
    if config.metrics_port is None:
        return NullMeter()
    own = has_own_network()
    host, port = (None, config.metrics_port) if own else (config.coordinator_host, config.metrics_port + rank)
    registry = CollectorRegistry()
    RankMetrics(config.pipeline, rank, recorder.busy, registry)
    meter = PipelineMetrics(config.pipeline, report, registry) if report is not None else NullMeter()
    serve_in_thread(metrics_app(registry, recorder.busy), host, port)
    return meter


def measured_engine(config: WorkerConfig, stage: Stage, deliver: OnSample, aside: Aside) -> MeteredEngine:
    """The engine of ``stage``, measured before it serves and limited to its budget."""
    sampling = Sampling(config.measure_every)
    engine = MeteredEngine(
        stage, deliver, recompute=config.recompute_activations, sampling=sampling, aside=aside
    )
    if config.calibrate:
        calibrate(engine, config.microbatch_tokens)
    if config.memory_budget is not None:
        limit_memory(stage.device, config.memory_budget, stage.resident_bytes)
    return engine


def choose_backend(config: WorkerConfig, device: torch.device) -> Backend:
    """NCCL between GPUs; gloo between CPUs, or where the configuration asks for it (several ranks on one GPU)."""
    if config.backend != "auto":
        return config.backend
    return "nccl" if device.type == "cuda" else "gloo"


def open_transport(
    config: WorkerConfig,
    stage: Stage,
    device: torch.device,
    backend: Backend,
    mailbox: Mailbox,
) -> Transport:
    return Transport(
        rank=stage.index,
        world=config.stages,
        forward_width=stage.entering.width,
        backward_width=stage.leaving.learnt,
        dtype=getattr(torch, config.model.dtype),
        device=device,
        backend=backend,
        deliver_forward=mailbox.put_forward,
        deliver_backward=mailbox.put_backward,
        on_error=mailbox.fail,
    )


def turns_of(config: WorkerConfig, rank: int) -> Turns | None:
    """None on the last stage, which turns round at once."""
    return Turns(config.stages - rank) if rank < config.stages - 1 else None


def rendezvous_if_needed(config: WorkerConfig, rank: int, run_id: str, backend: Backend) -> None:
    if config.stages > 1:
        host, own = config.coordinator_host, has_own_network()
        listen = "" if own else host
        if not own:
            stay_on_loopback(host, os.environ)
        rendezvous(host, config.rendezvous_port, rank, config.stages, run_id, backend, listen=listen)


def has_own_network() -> bool:
    """In a pod every rank has its own address; local ranks share one and must not fight for a port."""
    return "MLORA_POD_NAME" in os.environ
