"""What the coordinator works with; all of it can be exchanged in a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from mlora_worker.coordinator.dispatch.issuing import Announce
from mlora_worker.coordinator.metrics import Meter, NullMeter
from mlora_worker.coordinator.preparation.prepare import BaseModel
from mlora_worker.coordinator.uploads.checkpoints import KEPT_BYTES, OpenCheckpoints
from mlora_worker.coordinator.uploads.retrier import CallLater, WorkPool
from mlora_worker.coordinator.uploads.timer import DelayedCalls
from mlora_worker.data.training_rows.reference_files import ReferenceFiles
from mlora_worker.preparing.maker import RowMaker
from mlora_worker.protocol import (
    MemorySample,
    StageReport,
    StorageAccess,
)
from mlora_worker.storage.artifacts.aside import Aside
from mlora_worker.storage.artifacts.local_spool import LocalSpool
from mlora_worker.storage.object_store.store import Store
from mlora_worker.stream.costs import StageCost
from mlora_worker.stream.timeline import Timeline

# Names of tasks by uid, and how many of the newest microbatches: 0 for all.
CollectTimeline = Callable[[Mapping[str, str], int], Timeline]
OpenStore = Callable[[StorageAccess], Store]


@dataclass(frozen=True, slots=True)
class CoordinatorParts:
    """What the coordinator works with; all of it can be exchanged in a test."""

    base: BaseModel
    stages: tuple[StageReport, ...]
    run_id: str
    microbatch_tokens: int
    open_store: OpenStore
    rows: RowMaker
    announce: Announce
    preparing: WorkPool  # tasks that have never trained
    resuming: WorkPool  # the others: what they have done waits for nobody's new rows
    storing: WorkPool
    end: Callable[[Exception], None]  # the pipeline itself is broken: end the group
    open_checkpoints: OpenCheckpoints | None = None  # None: below each task's own output, with its keys
    spool: LocalSpool = field(
        default_factory=lambda: LocalSpool(None)
    )  # this rank's own volume; by default none
    aside: Aside = field(default_factory=Aside)  # for what of tasks no stage computes with
    # Bytes on each stage that its budget counts and no task in training has: see ``Aside.held``.
    held: Callable[[], tuple[int, ...]] = tuple
    references: ReferenceFiles = field(
        default_factory=ReferenceFiles
    )  # on this rank's volume; by default none
    kept_bytes: int = KEPT_BYTES  # of states of tasks that wait for their return, in this rank's memory
    costs: Sequence[StageCost] | None = None  # of each stage, to plan with
    timeline: CollectTimeline = lambda *_: Timeline(stages=0, spans=())
    memory: Callable[[], tuple[MemorySample, ...]] = tuple  # the newest samples of all stages
    wire: Callable[[], tuple[int, int]] = lambda: (0, 0)  # payload and descriptor bytes of all ranks
    meter: Meter = field(default_factory=NullMeter)
    clock: Callable[[], float] = time.monotonic
    today: Callable[[], date] = date.today
    later: CallLater = field(default_factory=DelayedCalls)
