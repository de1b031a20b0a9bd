"""Where a task stands, from what is said of it now and what was written before."""

from __future__ import annotations

from typing import Any

from mlora_operator.reconcile.admission.pipeline_view import PipelineView, view
from mlora_operator.reconcile.admission.workload import progress_of, sent_admissions
from mlora_operator.reconcile.state.snapshot import Contact
from mlora_worker.protocol import DataCounts, Plan

ROWS = DataCounts(rows=10, used=8, tokens=800)


def crew(make: Any, contact: Contact, status: dict[str, Any] | None = None, **spec: Any) -> PipelineView:
    task = make.task(status=status, **spec)
    return view(make.pipeline(), (task,), make.snapshot(task, group=make.group(), contact=contact))


def test_what_a_former_run_was_told_does_not_hold_in_this_one(make: Any) -> None:
    report = make.report(make.reported("Prepared"), run="run-2")
    plan = Plan.model_validate(
        {
            "generation": 1,
            "tasks": [
                {
                    "uid": "uid-team-a-t1", "namespace": "team-a", "name": "t1", "priority": 0, "admitted": True,
                    "baseModel": make.model, "lora": {}, "training": {}, "dataset": {"uri": "s3://d/rows.jsonl"},
                    "outputUri": "s3://adapters/t1", "storage": {},
                }
            ],
        }
    )  # fmt: skip
    said = {
        run: sent_admissions(crew(make, Contact(report=report, sent=plan, sent_run=run)))
        for run in ("run-1", "run-2")
    }
    assert said == {"run-1": {}, "run-2": {"uid-team-a-t1": True}}


def test_what_a_new_run_has_not_counted_yet_is_known_from_the_status(make: Any) -> None:
    status = {"step": 3, "totalSteps": 5, "data": ROWS.model_dump(mode="json", by_alias=True)}
    contact = Contact(report=make.report(make.reported("Prepared", data=None, total_steps=0)))
    seen = crew(make, contact, status, training={"batchSize": 2})
    found = progress_of(seen, seen.tasks[0])
    assert (found.total_steps, found.step_tokens) == (5, 200)
