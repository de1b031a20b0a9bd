"""Any rank but 0: one stage, which does what rank 0 says. It reads in the order in which it happens."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlora_worker.coordinator.http.server import health_app, serve_in_thread
from mlora_worker.pipeline import collect
from mlora_worker.pipeline.frames import Header, Payload
from mlora_worker.pipeline.hello import Membership, Trust
from mlora_worker.pipeline.lanes import LateReader, device_of
from mlora_worker.pipeline.link import Spoke
from mlora_worker.pipeline.loop import StageLoop
from mlora_worker.pipeline.mailbox import Mailbox
from mlora_worker.pipeline.results import StageState
from mlora_worker.pipeline.trace import SpanRecorder, marks_of
from mlora_worker.pipeline.transport import Transport
from mlora_worker.protocol import (
    WorkerConfig,
)
from mlora_worker.rank.base_model import load_own_stage, open_model, stage_report, with_commit
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
from mlora_worker.rank.stores import aside_of
from mlora_worker.runtime.termination import Termination
from mlora_worker.runtime.threads import started_pool
from mlora_worker.runtime.tls import client_context
from mlora_worker.stream.items import ITEM, Checkpoint, Evaluate, Keep, Train


def run_later_rank(
    config: WorkerConfig, rank: int, device: torch.device, group: Membership, termination: Termination
) -> None:
    """Any rank but 0. Asked to end, it tells rank 0 and serves on until the stream stops."""
    if has_own_network():
        serve_in_thread(health_app(), None, config.http_port, tls_of(config))
    spoke = Spoke.join(config.coordinator_host, config.link_port, group, rank, trust=_trust(config))
    config = with_commit(config, spoke.told["commit"])
    last = rank == config.stages - 1
    mailbox = Mailbox(threading.Condition(), turns=turns_of(config, rank))
    transport: Transport | None = None
    aside = aside_of(config, device)

    recorder = SpanRecorder(rank, marks_of(device))
    serve_metrics(config, rank, recorder, None)

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
    rendezvous_if_needed(config, rank, spoke.run_id, backend)
    files = open_model(config)
    stage = load_own_stage(config, rank, files, device)
    transport = open_transport(config, stage, device, backend, mailbox)
    engine = measured_engine(
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


def _trust(config: WorkerConfig) -> Trust | None:
    """By what a rank knows rank 0: the certificate that all ranks have."""
    if config.tls_dir is None:
        return None
    folder = Path(config.tls_dir)
    return Trust(lambda: client_context(folder), config.coordinator_host)


def _never(*_: Any) -> None:
    raise AssertionError("only rank 0 gets microbatches back")
