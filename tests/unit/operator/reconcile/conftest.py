"""Builders of real objects, each with sensible defaults: ``make.task(...)``, ``make.report(...)``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mlora_operator.api.meta import Condition
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.decode import read_pipeline, read_task
from mlora_operator.reconcile.state.snapshot import (
    Contact,
    Key,
    Pipeline,
    Pod,
    ProcessEnding,
    Snapshot,
    Task,
    WorkerGroup,
)
from mlora_operator.settings import Settings
from mlora_worker.protocol import (
    AdapterInfo,
    DataCounts,
    Failure,
    FailureReason,
    ModelFacts,
    Report,
    StageReport,
    TaskPhase,
    TaskReport,
)
from tests.fixtures.raw_object import raw_object
from tests.fixtures.toy_facts import toy_facts, toy_stages

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
MODEL = "Org/Toy-1B"


def merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in changes.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return out


class Make:
    now = NOW
    model = MODEL

    @staticmethod
    def raw_task(
        name: str = "t1",
        namespace: str = "team-a",
        *,
        age: float = 60,
        status: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> dict[str, Any]:
        least = {
            "baseModel": MODEL,
            "dataset": {"uri": "s3://datasets/rows.jsonl"},
            "output": {"uri": f"s3://adapters/{name}"},
        }
        return raw_object(namespace, name, NOW - timedelta(seconds=age), merge(least, spec), status)

    def task(self, name: str = "t1", namespace: str = "team-a", **fields: Any) -> Task:
        return read_task(self.raw_task(name, namespace, **fields), allow_file_uris=False)

    @staticmethod
    def raw_pipeline(
        name: str = "toy",
        namespace: str = "team-a",
        *,
        age: float = 3600,
        status: Mapping[str, Any] | None = None,
        generation: int = 1,
        annotations: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> dict[str, Any]:
        return raw_object(
            namespace,
            name,
            NOW - timedelta(seconds=age),
            merge({"model": {"name": MODEL, "uri": "s3://models/toy"}, "stages": 2}, spec),
            status,
            generation=generation,
            annotations=dict(annotations or {}),
        )

    def pipeline(self, name: str = "toy", namespace: str = "team-a", **fields: Any) -> Pipeline:
        return read_pipeline(self.raw_pipeline(name, namespace, **fields))

    @staticmethod
    def condition(type_: str, status: str, reason: str = "Reason", since: datetime = NOW) -> dict[str, Any]:
        return Condition(
            type=type_,
            status=status,  # type: ignore[arg-type]
            reason=reason,
            last_transition_time=since.strftime("%Y-%m-%dT%H:%M:%SZ"),
        ).model_dump(by_alias=True)

    @staticmethod
    def facts() -> ModelFacts:
        return toy_facts()

    @staticmethod
    def stages(capacity: int = 2**33, count: int = 2) -> tuple[StageReport, ...]:
        return toy_stages(layers=2 * count, stages=count, capacity_bytes=capacity)

    def report(
        self,
        *tasks: TaskReport,
        run: str = "run-1",
        sequence: int = 1,
        generation: int = 1,
        ready: bool = True,
        capacity: int = 2**33,
        count: int = 2,
        lacks: tuple[str, ...] | None = (),
    ) -> Report:
        """``lacks`` None: of workers of a former version, which know of no digests."""
        return Report(
            run_id=run,
            sequence=sequence,
            plan_generation=generation,
            ready=ready,
            facts=self.facts() if ready else None,
            stages=self.stages(capacity, count) if ready else (),
            tasks=tasks,
            lacks=lacks,
        )

    @staticmethod
    def reported(
        phase: str, name: str = "t1", namespace: str = "team-a", step: int = 0, **fields: Any
    ) -> TaskReport:
        if phase == "Succeeded":
            fields.setdefault(
                "adapter", AdapterInfo(uri=f"s3://adapters/{name}", sha256="ab" * 32, bytes=1000)
            )
        if phase == "Failed":
            fields.setdefault(
                "failure", Failure(reason=FailureReason.INVALID_ROW, message="line 7: no completion")
            )
        if phase != "Preparing":
            fields.setdefault("data", DataCounts(rows=10, used=9, dropped={"NoAnswer": 1}))
            fields.setdefault("total_steps", 50)
        return TaskReport(uid=f"uid-{namespace}-{name}", phase=TaskPhase(phase), step=step, **fields)

    @staticmethod
    def group(
        replicas: int = 2,
        ready: int | None = None,
        revision: str = "new",
        pod_revision: str | None = None,
        problem: Cause | None = None,
        refusal: Cause | None = None,
        missing: int = 0,
        starts: int = 0,
        uids: tuple[str, ...] = (),
        ended: Mapping[int, ProcessEnding] | None = None,
        ready_since: datetime | None = None,
    ) -> WorkerGroup:
        up = replicas if ready is None else ready
        pods = tuple(
            Pod(
                key=Key("team-a", f"mlora-toy-{number}"),
                uid=uids[number] if uids else f"pod-{number}",
                revision=pod_revision or revision,
                ready=number < up,
                problem=problem if number >= up else None,
                restarts=starts,
                ended=(ended or {}).get(number),
                ready_since=ready_since,
            )
            for number in range(replicas - missing)
        )
        return WorkerGroup(replicas=replicas, revision=revision, pods=pods, problem=refusal)

    def snapshot(
        self,
        *tasks: Task,
        pipelines: tuple[Pipeline, ...] | None = None,
        group: WorkerGroup | None = None,
        contact: Contact | None = None,
        **fields: Any,
    ) -> Snapshot:
        """One pipeline team-a/toy unless ``pipelines`` says otherwise."""
        key = Key("team-a", "toy")
        known = (self.pipeline(),) if pipelines is None else pipelines
        return Snapshot(
            tasks=tasks,
            pipelines=known,
            groups={key: group} if group is not None else {},
            contacts={key: contact} if contact is not None else {},
            revisions={one.key: "new" for one in known},
            **fields,
        )

    @staticmethod
    def settings(**fields: Any) -> Settings:
        return Settings.model_validate(
            {"namespace": "mlora-system", "worker": {"image": "worker:1"}, **fields}
        )


@pytest.fixture
def make() -> Make:
    return Make()
