"""Rank 0: the hub of the links, the coordinator, and stage 0. It reads in the order in which it happens."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping

import torch

from mlora_worker.coordinator.http.server import coordinator_app, serve_in_thread
from mlora_worker.coordinator.parts import CoordinatorParts
from mlora_worker.coordinator.preparation.prepare import BaseModel
from mlora_worker.coordinator.service import Coordinator
from mlora_worker.coordinator.uploads.fair_queue import FairQueue
from mlora_worker.coordinator.uploads.retrier import WorkPool
from mlora_worker.coordinator.uploads.timer import DelayedCalls
from mlora_worker.model.architecture import read_architecture
from mlora_worker.model.facts import facts_of
from mlora_worker.pipeline import collect
from mlora_worker.pipeline.faults import Fault
from mlora_worker.pipeline.frames import Header, LinkClosed, Payload
from mlora_worker.pipeline.hello import Membership
from mlora_worker.pipeline.lanes import LateReader, device_of
from mlora_worker.pipeline.link import Hub
from mlora_worker.pipeline.loop import StageLoop
from mlora_worker.pipeline.mailbox import Mailbox
from mlora_worker.pipeline.results import StageState
from mlora_worker.pipeline.samples import SampleBook
from mlora_worker.pipeline.trace import SpanRecorder, marks_of
from mlora_worker.preparing.client import RowProcess
from mlora_worker.preparing.messages import Setup
from mlora_worker.protocol import (
    MemorySample,
    Report,
    StageReport,
    WorkerConfig,
)
from mlora_worker.rank.base_model import load_own_stage, open_model, stage_report, with_pinned_model
from mlora_worker.rank.parts import (
    choose_backend,
    has_own_network,
    measured_engine,
    open_transport,
    rendezvous_if_needed,
    serve_metrics,
    tls_of,
    turns_of,
)
from mlora_worker.rank.stores import aside_of, kept_bytes, local_spool, open_checkpoints, reference_files
from mlora_worker.runtime.termination import Termination
from mlora_worker.runtime.threads import started_pool
from mlora_worker.storage.artifacts.aside import tensors_in
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.stream.costs import launch_tokens, stage_costs, turn_tokens
from mlora_worker.stream.items import Item, Train

log = logging.getLogger(__name__)

# Threads of each kind of work. One store alone gets a third of them, two of the five and six of the sixteen.
PREPARING, STORING = 5, 16
_PEERS_LEAVE = 5.0  # seconds that the other ranks get to read the stream's last item
# Seconds in which a rank that starts notices by itself that a peer is lost, and ends in its own words.
_TO_NOTICE = 5.0


class FirstRank:
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
        preparing, resuming = _pool(PREPARING, "prepare"), _pool(PREPARING, "resume")
        storing, later = _pool(STORING, "store"), DelayedCalls().start()
        rows = RowProcess().start()
        app = coordinator_app(lambda: self._coordinator, self._group.token)
        host = None if has_own_network() else config.coordinator_host
        tls = tls_of(config)
        serve_in_thread(app, host, config.http_port, tls)
        config = self._config = with_pinned_model(config)
        told = {"commit": config.model.commit}
        hub = Hub.gather(config.link_port, self._group, run_id, host=host or "", tls=tls, told=told)
        log.info("run %s: all %d ranks have connected", run_id, config.stages)
        mailbox = Mailbox(
            self._changed,
            supply=lambda: self._coordinator.supply() if self._coordinator else None,
            turns=turns_of(config, 0),
        )

        def lost(error: Exception) -> None:
            """Torch opens its channels with a peer's help, and may wait for a dead one for hours: nothing can wake it."""
            mailbox.fail(error)
            time.sleep(_TO_NOTICE)
            if self._coordinator is None:
                self._leave(error)

        hub.start(self._heard, lost, self._aside.buffer)

        backend = choose_backend(config, self._device)
        rendezvous_if_needed(config, 0, run_id, backend)
        files = open_model(config)
        folder = files.folder()
        architecture = read_architecture(folder)
        facts = facts_of(architecture, config.stages, getattr(torch, config.model.dtype))
        stage = load_own_stage(config, 0, files, self._device)
        transport = open_transport(config, stage, self._device, backend, mailbox)

        def sampled(sample: MemorySample) -> None:
            with self._changed:
                self._samples.add(sample)

        engine = measured_engine(config, stage, sampled, self._aside)
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
        meter = serve_metrics(config, 0, recorder, self._current_report)
        self._spans = collect.SpanCollector(recorder, config.stages, ask)
        coordinator = Coordinator(
            CoordinatorParts(
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
                open_checkpoints=open_checkpoints(config),
                spool=local_spool(config),
                references=reference_files(config),
                aside=self._aside,
                held=self._held_bytes,
                kept_bytes=kept_bytes(config, self._device),
                costs=stage_costs(
                    facts,
                    config.stages,
                    launch_tokens(self._device.type),
                    turn_tokens(self._device.type),
                ),
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

    def _current_report(self) -> Report | None:
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
                log.info("rank %d received a request to stop: the group ends", rank)
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


def _pool(threads: int, name: str) -> WorkPool:
    return WorkPool(started_pool(threads, name), FairQueue(threads))
