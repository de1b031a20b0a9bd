"""Puts one rank together: link, rendezvous, model, loop. It reads in the order in which it happens."""

from __future__ import annotations

import json
import logging
import os
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from mlora_worker.coordinator.http.server import coordinator_app, health_app, serve_in_thread
from mlora_worker.coordinator.metrics import Meter, PipelineMetrics, RankMetrics, Unmetered, metrics_app
from mlora_worker.coordinator.preparation.prepare import BaseModel
from mlora_worker.coordinator.service import Coordinator, Surroundings
from mlora_worker.coordinator.uploads.checkpoints import KEPT_BYTES, OpenPlace
from mlora_worker.coordinator.uploads.fair_queue import StoreTurns
from mlora_worker.coordinator.uploads.retrier import Lane
from mlora_worker.coordinator.uploads.timer import Later
from mlora_worker.model.architecture import read_architecture
from mlora_worker.model.facts import facts_of, model_facts
from mlora_worker.model.load import load_stage
from mlora_worker.model.stage import Stage
from mlora_worker.pipeline import collect
from mlora_worker.pipeline.budget import limit_memory
from mlora_worker.pipeline.calibrate import calibrate
from mlora_worker.pipeline.engine import StageState
from mlora_worker.pipeline.faults import Fault
from mlora_worker.pipeline.frames import Header, LinkClosed, Payload
from mlora_worker.pipeline.hello import Membership, Trust
from mlora_worker.pipeline.lanes import LateReader, device_of
from mlora_worker.pipeline.link import Hub, Spoke
from mlora_worker.pipeline.listening import stay_on_loopback
from mlora_worker.pipeline.loop import StageLoop
from mlora_worker.pipeline.mailbox import Mailbox
from mlora_worker.pipeline.metered import MeteredEngine, OnSample, Sampling
from mlora_worker.pipeline.samples import SampleBook
from mlora_worker.pipeline.trace import SpanRecorder, marks_of
from mlora_worker.pipeline.transport import Backend, Transport, rendezvous
from mlora_worker.preparing.client import RowProcess
from mlora_worker.preparing.messages import Setup
from mlora_worker.protocol import (
    MemorySample,
    ModelFacts,
    Report,
    StageReport,
    TaskPlan,
    WorkerConfig,
)
from mlora_worker.runtime.allocator import give_back_freed_memory, keep_freed_memory
from mlora_worker.runtime.termination import Termination
from mlora_worker.runtime.threads import started_pool
from mlora_worker.runtime.tls import client_context, server_context
from mlora_worker.storage.artifacts.aside import Aside, tensors_in
from mlora_worker.storage.artifacts.local_spool import KeptWork
from mlora_worker.storage.base_model.model_source import ModelFiles, RemoteAccess, pinned
from mlora_worker.storage.base_model.model_source import open_model as open_model_files
from mlora_worker.storage.object_store.s3_client import Manners
from mlora_worker.storage.object_store.store import Store, open_store, open_store_from_files, read_hub_token
from mlora_worker.storage.uri import join
from mlora_worker.stream.costs import launch_tokens, stage_costs
from mlora_worker.stream.items import ITEM, Checkpoint, Evaluate, Item, Keep, Train
from mlora_worker.stream.turns import Turns

log = logging.getLogger(__name__)

# Threads of each kind of work. One store alone gets a third of them, two of the five and six of the sixteen.
_PREPARING, _STORING = 5, 16
_PEERS_LEAVE = 5.0  # seconds that the other ranks get to read the stream's last item
# Seconds in which a rank that starts notices by itself that a peer is lost, and ends in its own words.
_TO_NOTICE = 5.0


def run_rank(
    config: WorkerConfig, rank: int, termination: Termination, leave: Callable[[Exception], None]
) -> None:
    """Run until the stream stops. When asked to end, the group saves what it has done first. ``leave`` ends the process at
    once, with nothing to save.

    Raises ``LinkClosed`` when a peer is lost, other errors when this rank fails.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    if device.type == "cpu":
        # With a budget from the beginning: what a calibration frees would else stay in the heap, of no use to large blocks.
        (keep_freed_memory if config.memory_budget is None else give_back_freed_memory)()
    group = Membership(config.pipeline, config.stages, lambda: Path(config.token_file).read_text().strip())
    group.key()  # a token that cannot be used ends this rank at once
    if rank == 0:
        _FirstRank(config, device, group, leave).run(termination)
    else:
        _run_later_rank(config, rank, device, group, termination)


def choose_device(wish: str) -> torch.device:
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class _FirstRank:
    """Rank 0: the hub of the links, the coordinator, and stage 0."""

    def __init__(
        self,
        config: WorkerConfig,
        device: torch.device,
        group: Membership,
        leave: Callable[[Exception], None],
    ) -> None:
        self._config, self._device, self._group, self._leave = config, device, group, leave
        self._coordinator: Coordinator | None = None
        self._spans: collect.SpanCollector | None = None
        self._ready: dict[int, StageReport] = {}
        self._samples = SampleBook(config.stages)
        self._aside = aside_of(config, device)
        self._held: dict[int, int] = {}  # bytes that each other rank holds of tasks that do not train
        self._wire: dict[int, int] = {}  # payload bytes that each rank has sent, as last heard
        self._changed = threading.Condition()

    def run(self, termination: Termination) -> None:
        config, run_id = self._config, uuid.uuid4().hex
        # Before the memory has a limit that a new thread would not find room in.
        preparing, resuming = _lane(_PREPARING, "prepare"), _lane(_PREPARING, "resume")
        storing, later = _lane(_STORING, "store"), Later().start()
        rows = RowProcess().start()
        app = coordinator_app(lambda: self._coordinator, self._group.token)
        host = None if _has_own_network() else config.coordinator_host
        tls = tls_of(config)
        serve_in_thread(app, host, config.http_port, tls)
        config = self._config = with_pinned_model(config)
        told = {"commit": config.model.commit}
        hub = Hub.gather(config.link_port, self._group, run_id, host=host or "", tls=tls, told=told)
        log.info("run %s: all %d ranks are here", run_id, config.stages)
        mailbox = Mailbox(
            self._changed,
            supply=lambda: self._coordinator.supply() if self._coordinator else None,
            turns=_turns(config, 0),
        )

        def lost(error: Exception) -> None:
            """Torch opens its channels with a peer's help, and may wait for a dead one for hours: nothing can wake it."""
            mailbox.fail(error)
            time.sleep(_TO_NOTICE)
            if self._coordinator is None:
                self._leave(error)

        hub.start(self._heard, lost, self._aside.buffer)

        backend = choose_backend(config, self._device)
        _rendezvous_if_needed(config, 0, run_id, backend)
        files = open_model(config)
        folder = files.folder()
        architecture = read_architecture(folder)
        facts = facts_of(architecture, config.stages, getattr(torch, config.model.dtype))
        stage = _load(config, 0, files, self._device)
        transport = _transport(config, 0, facts, self._device, backend, mailbox)

        def sampled(sample: MemorySample) -> None:
            with self._changed:
                self._samples.add(sample)

        engine = _measured_engine(config, stage, sampled, self._aside)
        self._note_ready(0, stage_report(0, stage, self._device, engine.group_names))
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) == config.stages or mailbox.failed)
        rows.set_up(
            Setup(
                config=config,
                folder=str(folder),
                max_positions=facts.max_positions,
                vocabulary=facts.vocab_size,
            )
        )

        def announce(item: Item, payloads: Mapping[int, Payload]) -> None:
            if config.stages > 1:
                hub.broadcast(item.model_dump(mode="json", by_alias=True), payloads)
                if isinstance(item, Train):
                    transport.expect_backward(item.number, item.tokens, len(item.segments))

        def ask(question: Header) -> None:
            with self._changed:  # descriptors are sent with it held, and messages may not mix
                hub.broadcast(question, {})

        recorder = SpanRecorder(0, marks_of(self._device))
        meter = _serve_metrics(config, 0, recorder, self._told)
        self._spans = collect.SpanCollector(recorder, config.stages, ask)
        coordinator = Coordinator(
            Surroundings(
                base=BaseModel(config.model, architecture, facts),
                stages=tuple(self._ready[index] for index in sorted(self._ready)),
                run_id=run_id,
                microbatch_tokens=config.microbatch_tokens,
                open_store=lambda access: open_store(
                    access, allow_files=config.allow_file_uris, allowed_networks=config.allowed_networks
                ),
                rows=rows,
                announce=announce,
                preparing=preparing,
                resuming=resuming,
                storing=storing,
                later=later,
                end=mailbox.fail,
                checkpoint_place=checkpoint_place(config),
                kept=kept_work(config),
                aside=self._aside,
                held=self._held_bytes,
                kept_bytes=kept_bytes(config, self._device),
                costs=stage_costs(facts, config.stages, launch_tokens(self._device.type)),
                timeline=self._spans.collect,
                memory=self._samples.all,
                wire=lambda: (transport.payload_bytes + sum(self._wire.values()), hub.sent_bytes),
                meter=meter,
            ),
            self._changed,
        )
        loop = StageLoop(
            first=True,
            last=config.stages == 1,
            engine=engine,
            mailbox=mailbox,
            neighbours=transport,
            on_returned=LateReader(device_of(self._device), coordinator.returned, mailbox.fail).read,
            on_exported=lambda task, tensors: coordinator.exported(0, task, tensors),
            on_fault=coordinator.faulted,
            on_checkpoint=lambda item, part: coordinator.checkpointed(0, item.task, item.number, part),
            on_evaluated=LateReader(device_of(self._device), coordinator.evaluated, mailbox.fail).read,
            on_kept=lambda item, tensors: coordinator.keep(0, item.task, item.number, tensors),
            record=recorder.span,
        )
        self._coordinator = coordinator
        termination.listen(coordinator.wind_down)
        log.info("ready: %s on %d stages", config.model.name, config.stages)
        loop.run()
        with self._changed:  # a link that is closed with something unread in it may lose what was sent last
            self._changed.wait_for(lambda: config.stages == 1 or mailbox.failed, _PEERS_LEAVE)

    def _told(self) -> Report | None:
        return self._coordinator.wait_report(-1, 0.0) if self._coordinator is not None else None

    def _held_bytes(self) -> tuple[int, ...]:
        return (self._aside.held, *(self._held.get(rank, 0) for rank in range(1, self._config.stages)))

    def _note_ready(self, rank: int, report: StageReport) -> None:
        with self._changed:
            self._ready[rank] = report
            self._changed.notify_all()

    def _heard(self, rank: int, header: Header, payload: Payload) -> None:
        """A message of another rank; called by its link's thread."""
        self._held[rank] = int(header.get("held", self._held.get(rank, 0)))
        match header["kind"]:
            case "ready":
                self._note_ready(rank, StageReport.model_validate(header["stage"]))
            case "adapter":
                self._wire[rank] = int(header["payloadBytes"])
                assert self._coordinator is not None
                self._coordinator.exported(rank, header["task"], tensors_in(payload))
            case "checkpoint":
                assert self._coordinator is not None
                part = StageState(int(header["updates"]), tensors_in(payload))
                self._coordinator.checkpointed(rank, header["task"], int(header["number"]), part)
            case "evaluated":
                assert self._coordinator is not None
                # They travel as text: JSON knows no NaN.
                scores = torch.tensor([float(one) for one in header["scores"]], dtype=torch.float64)
                self._coordinator.evaluated(int(header["number"]), scores)
            case "kept":
                assert self._coordinator is not None
                number, tensors = int(header["number"]), tensors_in(payload)
                self._coordinator.keep(rank, header["task"], number, tensors)
            case "terminating":
                log.info("rank %d was asked to stop: the group ends", rank)
                if self._coordinator is None:
                    # Nothing has begun. Later, tasks would train until that rank's time is over, and lose their steps.
                    self._leave(LinkClosed(f"rank {rank} was asked to stop"))
                else:
                    self._coordinator.wind_down()
            case collect.ANSWER:
                assert self._spans is not None
                self._spans.heard(rank, header, bytes(payload))
            case "held":
                assert self._coordinator is not None
                self._coordinator.held_changed()
            case "memory":
                with self._changed:
                    self._samples.add(MemorySample.model_validate(header["sample"]))
            case "fault":
                assert self._coordinator is not None
                self._coordinator.faulted(Fault.model_validate(header["fault"]))


def _run_later_rank(
    config: WorkerConfig, rank: int, device: torch.device, group: Membership, termination: Termination
) -> None:
    """Any rank but 0. Asked to end, it tells rank 0 and serves on until the stream stops."""
    if _has_own_network():
        serve_in_thread(health_app(), None, config.http_port, tls_of(config))
    spoke = Spoke.join(config.coordinator_host, config.link_port, group, rank, trust=_trust(config))
    config = with_commit(config, spoke.told["commit"])
    last = rank == config.stages - 1
    mailbox = Mailbox(threading.Condition(), turns=_turns(config, rank))
    transport: Transport | None = None
    aside = aside_of(config, device)

    recorder = SpanRecorder(rank, marks_of(device))
    _serve_metrics(config, rank, recorder, None)

    answer = collect.answering(recorder, spoke.send, started_pool(1, "spans"))

    def heard(_: int, header: Header, payload: Payload) -> None:
        if header["kind"] == collect.QUESTION:
            answer(header)
            return
        item = ITEM.validate_python(header)
        if isinstance(item, Train | Evaluate):
            assert transport is not None
            transport.expect_forward(item.number, item.tokens)
            if isinstance(item, Train) and not last:
                transport.expect_backward(item.number, item.tokens, len(item.segments))
        mailbox.put_item(item, payload)

    backend = choose_backend(config, device)
    _rendezvous_if_needed(config, rank, spoke.run_id, backend)
    files = open_model(config)
    facts = model_facts(files.folder(), config.stages, getattr(torch, config.model.dtype))
    stage = _load(config, rank, files, device)
    transport = _transport(config, rank, facts, device, backend, mailbox)
    engine = _measured_engine(
        config,
        stage,
        lambda sample: spoke.send(
            {"kind": "memory", "sample": sample.model_dump(mode="json", by_alias=True)}
        ),
        aside,
    )
    spoke.start(heard, mailbox.fail, aside.buffer)
    spoke.send(
        {
            "kind": "ready",
            "stage": json.loads(stage_report(rank, stage, device, engine.group_names).to_json()),
        }
    )

    def exported(task: str, tensors: dict[str, Tensor]) -> None:
        assert transport is not None
        spoke.send(
            {"kind": "adapter", "task": task, "payloadBytes": transport.payload_bytes},
            aside.payload(tensors),
        )

    def kept(item: Keep, tensors: dict[str, Tensor]) -> None:
        header = {"kind": "kept", "task": item.task, "number": item.number}
        spoke.send(header, aside.payload(tensors))

    def evaluated(number: int, scores: Tensor) -> None:
        spoke.send({"kind": "evaluated", "number": number, "scores": [repr(one) for one in scores.tolist()]})

    sending = started_pool(1, "checkpoints")  # the loop goes on meanwhile

    def checkpointed(item: Checkpoint, part: StageState) -> None:
        left = [part]  # it is let go of before it has been sent: a link may be slow

        def send() -> None:
            try:
                header = {"kind": "checkpoint", "task": item.task, "number": item.number}
                header |= {"updates": left[0].updates, "held": aside.held}
                payload = aside.payload(left.pop().tensors)
                spoke.send(header, payload)
                del payload
                if header["held"]:
                    spoke.send({"kind": "held", "held": aside.held})
            except Exception as error:  # rank 0 would wait for it for ever
                mailbox.fail(error)

        sending.submit(send)

    termination.listen(lambda: spoke.send({"kind": "terminating"}))
    StageLoop(
        first=False,
        last=last,
        engine=engine,
        mailbox=mailbox,
        neighbours=transport,
        on_returned=_never,
        on_exported=exported,
        on_fault=lambda fault: spoke.send(
            {
                "kind": "fault",
                "fault": fault.model_dump(mode="json", by_alias=True),
                "held": aside.held,
            }
        ),
        on_checkpoint=checkpointed,
        on_evaluated=LateReader(device_of(device), evaluated, mailbox.fail).read,
        on_kept=kept,
        record=recorder.span,
    ).run()


def tls_of(config: WorkerConfig) -> ssl.SSLContext | None:
    """How the HTTP port is encrypted, and on rank 0 the links; None: not at all. Raises ``CannotServe``."""
    return (
        server_context(Path(config.tls_dir), config.coordinator_host) if config.tls_dir is not None else None
    )


def _trust(config: WorkerConfig) -> Trust | None:
    """By what a rank knows rank 0: the certificate that all ranks have."""
    if config.tls_dir is None:
        return None
    folder = Path(config.tls_dir)
    return Trust(lambda: client_context(folder), config.coordinator_host)


def _lane(threads: int, name: str) -> Lane:
    return Lane(started_pool(threads, name), StoreTurns(threads))


def _serve_metrics(
    config: WorkerConfig, rank: int, recorder: SpanRecorder, told: Callable[[], Report | None] | None
) -> Meter:
    """Where the configuration names a port. ``told``: the coordinator's report, which rank 0 alone has."""
    if config.metrics_port is None:
        return Unmetered()
    own = _has_own_network()
    host, port = (None, config.metrics_port) if own else (config.coordinator_host, config.metrics_port + rank)
    registry = CollectorRegistry()
    RankMetrics(config.pipeline, rank, recorder.busy, registry)
    meter = PipelineMetrics(config.pipeline, told, registry) if told is not None else Unmetered()
    serve_in_thread(metrics_app(registry, recorder.busy), host, port)
    return meter


def _measured_engine(config: WorkerConfig, stage: Stage, deliver: OnSample, aside: Aside) -> MeteredEngine:
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


def open_model(config: WorkerConfig) -> ModelFiles:
    store = open_store_from_files(
        config.storage_endpoint,
        config.storage_region,
        config.storage_keys_dir,
        allow_files=True,
        manners=Manners(config.storage_addressing, config.storage_checksums),
    )
    return open_model_files(store, config.model, Path(config.cache_dir), remote_access(config))


def remote_access(config: WorkerConfig) -> RemoteAccess:
    keys_dir = config.storage_keys_dir
    return RemoteAccess(
        hub_endpoint=config.hub_endpoint,
        hub_token=lambda: None if keys_dir is None else read_hub_token(Path(keys_dir)),
        allowed_networks=config.allowed_networks,
        cache_bytes=config.model_cache_bytes,
    )


def with_pinned_model(config: WorkerConfig) -> WorkerConfig:
    """With the commit that a model on a hub is at now."""
    return with_commit(config, pinned(config.model, remote_access(config)).commit)


def with_commit(config: WorkerConfig, commit: str | None) -> WorkerConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"commit": commit})})


def checkpoint_place(config: WorkerConfig) -> OpenPlace | None:
    """The pipeline's own place for checkpoints, with the keys of its model; None where each task has its own."""
    root = config.checkpoints_uri
    if root is None:
        return None

    def place(task: TaskPlan) -> tuple[Store, str]:
        store = open_store_from_files(
            config.storage_endpoint,
            config.storage_region,
            config.storage_keys_dir,
            allow_files=True,
            manners=Manners(config.storage_addressing, config.storage_checksums),
        )
        return store, join(root, f"{task.namespace}/{task.name}")

    return place


def kept_work(config: WorkerConfig) -> KeptWork:
    """Where finished work waits for a store that refuses it: beside the model's files, cleaned of what is left over."""
    kept = KeptWork(Path(config.cache_dir) / "kept")
    kept.clean(time.time())
    return kept


def aside_of(config: WorkerConfig, device: torch.device) -> Aside:
    """Where what nobody computes with goes: into files where the process has a budget of all its memory."""
    counts = device.type == "cpu" and config.memory_budget is not None
    made = Aside(Path(config.cache_dir) / "aside" if counts else None)
    made.clean()
    return made


def kept_bytes(config: WorkerConfig, device: torch.device) -> int:
    """Of states that wait in memory though the store has them. Where the process has a budget of all its memory, none: they
    would take room from tasks that train, which no sum of the operator's counts.
    """
    return 0 if device.type == "cpu" and config.memory_budget is not None else KEPT_BYTES


def stage_report(
    rank: int, stage: Stage, device: torch.device, groups: tuple[tuple[str, ...], ...]
) -> StageReport:
    """What the operator's memory model needs to know of this stage."""
    return StageReport(
        stage=rank,
        first_layer=stage.layer_range.start,
        last_layer=stage.layer_range.stop - 1,
        device=str(device),
        resident_bytes=stage.resident_bytes,
        capacity_bytes=capacity_bytes(device),
        input_groups=groups,
    )


def capacity_bytes(device: torch.device) -> int:
    """Memory of the device; on CPU the container's limit, or the machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):  # no such hierarchy, or "max"
            continue
        return min(limit, machine)
    return machine


def _load(config: WorkerConfig, rank: int, files: ModelFiles, device: torch.device) -> Stage:
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    stage = load_stage(files.folder(), files, rank, config.stages, dtype, device)
    files.prove()
    log.info("layers %d to %d are loaded on %s", stage.layer_range.start, stage.layer_range.stop - 1, device)
    return stage


def _transport(
    config: WorkerConfig,
    rank: int,
    facts: ModelFacts,
    device: torch.device,
    backend: Backend,
    mailbox: Mailbox,
) -> Transport:
    return Transport(
        rank=rank,
        world=config.stages,
        hidden_size=facts.hidden_size,
        dtype=getattr(torch, config.model.dtype),
        device=device,
        backend=backend,
        deliver_forward=mailbox.put_forward,
        deliver_backward=mailbox.put_backward,
        on_error=mailbox.fail,
    )


def _turns(config: WorkerConfig, rank: int) -> Turns | None:
    """None on the last stage, which turns round at once."""
    return Turns(config.stages - rank) if rank < config.stages - 1 else None


def _rendezvous_if_needed(config: WorkerConfig, rank: int, run_id: str, backend: Backend) -> None:
    if config.stages > 1:
        host, own = config.coordinator_host, _has_own_network()
        listen = "" if own else host
        if not own:
            stay_on_loopback(host, os.environ)
        rendezvous(host, config.rendezvous_port, rank, config.stages, run_id, backend, listen=listen)


def _has_own_network() -> bool:
    """In a pod every rank has its own address; local ranks share one and must not fight for a port."""
    return "MLORA_POD_NAME" in os.environ


def _never(*_: Any) -> None:
    raise AssertionError("only rank 0 gets microbatches back")
