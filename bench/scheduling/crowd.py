"""Tasks and pipelines as the reconcile loop has them, that change from one decision to the next."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from mlora_operator.reconcile.state.decode import read_pipeline, read_task
from mlora_operator.reconcile.state.snapshot import Contact, Pipeline, Snapshot, Task, WorkerGroup
from mlora_worker.protocol import (
    DataCounts,
    ModelFacts,
    ModuleShape,
    Report,
    StageReport,
    TaskPhase,
    TaskReport,
)

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
STAGES, LAYERS, HIDDEN, INTER = 2, 32, 4096, 11008
MODEL = "Org/Model-7B"
REFIT = 10
RUNNING = 6  # tasks that train on each pipeline
_MODULES = (
    ("q_proj", HIDDEN, HIDDEN), ("k_proj", HIDDEN, HIDDEN), ("v_proj", HIDDEN, HIDDEN), ("o_proj", HIDDEN, HIDDEN),
    ("gate_proj", HIDDEN, INTER), ("up_proj", HIDDEN, INTER), ("down_proj", INTER, HIDDEN),
)  # fmt: skip
_ROWS = DataCounts(rows=5000, used=5000, tokens=5000 * 230)


@dataclass
class Crowd:
    """``pipelines`` with so many tasks that wait for them, evenly; they train and end, and others come."""

    pipelines: int
    waiting: int
    seed: int
    policy: str = "priority"
    now: datetime = NOON
    known: list[Pipeline] = field(init=False)
    tasks: list[list[Task]] = field(init=False)  # by pipeline
    reported: list[dict[str, TaskReport]] = field(init=False)
    made: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.known = [read_pipeline(_pipeline(number, self.policy)) for number in range(self.pipelines)]
        self.tasks = [[] for _ in self.known]
        self.reported = [{} for _ in self.known]
        for number in range(self.waiting + RUNNING * self.pipelines):
            at = number % self.pipelines
            self._arrive(at, TaskPhase.TRAINING if number < RUNNING * self.pipelines else TaskPhase.PREPARED)
        self.facts = _facts()
        self.stages = [_stages() for _ in self.known]

    def snapshot(self) -> Snapshot:
        """What is now; reports are new ones, as after a long poll."""
        contacts = {
            pipeline.key: Contact(
                report=Report(
                    run_id="run-1", sequence=self.made, plan_generation=1, ready=True,
                    facts=self.facts, stages=self.stages[number], tasks=tuple(self.reported[number].values()),
                )
            )
            for number, pipeline in enumerate(self.known)
        }  # fmt: skip
        return Snapshot(
            tasks=tuple(task for tasks in self.tasks for task in tasks),
            pipelines=tuple(self.known),
            groups={pipeline.key: WorkerGroup(STAGES, "") for pipeline in self.known},
            revisions={pipeline.key: "" for pipeline in self.known},
            contacts=contacts,
        )

    def live(self) -> Iterator[None]:
        """One change after the other: all train a step, a task ends somewhere, one comes somewhere. After every
        ``REFIT``th the memory model says something new there, so that no answer about sets of tasks counts any more.
        """
        for change in count(1):
            self.now += timedelta(seconds=5)
            for reported in self.reported:
                for uid, one in list(reported.items()):
                    if one.phase is TaskPhase.TRAINING:
                        # One at its last step stays there until its turn to end: a report beyond it is refused.
                        step = min(one.step + 1, one.total_steps or one.step)
                        reported[uid] = one.model_copy(update={"step": step})
            at = self.rng.randrange(self.pipelines)
            self._end(at)
            self._arrive(at, TaskPhase.PREPARED)
            if change % REFIT == 0:
                less = {"capacity_bytes": self.stages[at][0].capacity_bytes - 2**20}
                self.stages[at] = tuple(stage.model_copy(update=less) for stage in self.stages[at])
            yield

    def follow(self, pipeline: int, admitted: set[str], told_to_leave: set[str]) -> None:
        """The worker does as it is told, at once."""
        reported = self.reported[pipeline]
        for uids, phase in ((told_to_leave, TaskPhase.PREEMPTED), (admitted, TaskPhase.TRAINING)):
            for uid in uids:
                reported[uid] = reported[uid].model_copy(update={"phase": phase})

    def _end(self, at: int) -> None:
        training = [uid for uid, one in self.reported[at].items() if one.phase is TaskPhase.TRAINING]
        if training:
            gone = self.rng.choice(training)
            del self.reported[at][gone]
            self.tasks[at] = [task for task in self.tasks[at] if task.uid != gone]

    def _arrive(self, at: int, phase: TaskPhase) -> None:
        self.made += 1
        task = read_task(self._raw(at), allow_file_uris=False)
        if phase is TaskPhase.TRAINING:
            assert task.spec is not None
            task = replace(task, spec=task.spec.model_copy(update={"priority": 3}))
        self.tasks[at].append(task)
        total = self.rng.randint(20, 2000)
        self.reported[at][task.uid] = TaskReport(
            uid=task.uid, phase=phase, step=total // 3 if phase is TaskPhase.TRAINING else 0,
            total_steps=total, data=_ROWS, tokens_per_second=900.0,
        )  # fmt: skip

    def _raw(self, at: int) -> dict[str, Any]:
        rng, number = self.rng, self.made
        created = self.now - timedelta(seconds=rng.randint(0, 3600))
        return {
            "metadata": {
                "namespace": f"team-{rng.randint(1, 9)}",
                "name": f"task-{number}",
                "uid": f"00000000-0000-0000-{at:04}-{number:012}",
                "creationTimestamp": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "generation": 1,
                "resourceVersion": "1",
            },
            "spec": {
                "baseModel": MODEL,
                "priority": rng.choice((0, 0, 0, 1, 2)),
                "lora": {
                    "rank": rng.choice((4, 8, 16, 32, 64)),
                    "targetModules": rng.choice((["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"],
                                                 ["all-linear"])),
                },
                "dataset": {"uri": "s3://datasets/rows.jsonl"},
                "training": {"batchSize": rng.choice((1, 2, 4, 8, 16)),
                             "maxSeqLength": rng.choice((256, 512, 1024, 2048))},
                "output": {"uri": f"s3://adapters/{number}"},
            },
            "status": {},
        }  # fmt: skip


def _pipeline(number: int, policy: str) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "ml", "name": f"pipeline-{number}", "uid": f"pipeline-{number}",
            "creationTimestamp": "2026-03-01T00:00:00Z", "generation": 1, "resourceVersion": "1",
        },
        "spec": {
            "model": {"name": MODEL, "uri": "s3://models/7b"},
            "stages": STAGES,
            "allowedNamespaces": {"from": "All"},
            "scheduling": {"policy": policy},
        },
    }  # fmt: skip


def _facts() -> ModelFacts:
    return ModelFacts(
        hidden_size=HIDDEN, intermediate_size=INTER, layers=LAYERS, attention_heads=32, vocab_size=32000,
        max_positions=4096, dtype_bytes=2,
        modules=tuple(
            ModuleShape(stage=stage, name=name, in_features=inputs, out_features=outputs, count=LAYERS // STAGES)
            for stage in range(STAGES)
            for name, inputs, outputs in _MODULES
        ),
    )  # fmt: skip


def _stages() -> tuple[StageReport, ...]:
    each = LAYERS // STAGES
    return tuple(
        StageReport(
            stage=stage, first_layer=each * stage, last_layer=each * (stage + 1) - 1, device=f"cuda:{stage}",
            resident_bytes=7 * 2**30, capacity_bytes=80 * 2**30,
        )
        for stage in range(STAGES)
    )  # fmt: skip
