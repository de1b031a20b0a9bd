"""Of several pipelines that serve a model, a task gets one that could train it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact, Key, Snapshot, Task, WorkerGroup

OLD, YOUNG = Key("team-a", "toy"), Key("team-a", "young")
GIVEN_UP = {"givenUp": "CannotServe", "observedGeneration": 1, "state": "Failed"}


def known(make: Any) -> dict[str, Any]:
    """The status of a pipeline whose model's shape is known."""
    facts, stages = make.facts(), make.stages()
    return {
        "observedGeneration": 1,
        "facts": facts.model_dump(mode="json", by_alias=True),
        "stages": [stage.model_dump(mode="json", by_alias=True) for stage in stages],
    }


def old(make: Any, why: str) -> Any:
    if why == "given up":
        return make.pipeline(OLD.name, age=5000, status=GIVEN_UP)
    if why == "too small":
        return make.pipeline(OLD.name, age=5000, status=known(make), memory={"budget": "50Mi"})
    return make.pipeline(OLD.name, age=5000, status=known(make))


def where(
    make: Any,
    task: Task,
    first: Any,
    second: Any,
    *,
    up: bool = True,
    there: WorkerGroup | None = None,
    heard: Contact | None = None,
) -> str | None:
    """``up``: the second one's workers are; ``there``: the first one's workers, ``heard``: and what they said."""
    groups = {key: group for key, group in ((YOUNG, make.group() if up else None), (OLD, there)) if group}
    contacts = {YOUNG: Contact(report=make.report())} if up else {}
    if heard is not None:
        contacts[OLD] = heard
    snapshot = Snapshot(
        tasks=(task,),
        pipelines=(first, second),
        groups=groups,
        contacts=contacts,
        revisions={OLD: "new", YOUNG: "new"},
    )
    found: str | None = decide(snapshot, make.settings(), make.now).task_statuses[task.key].pipeline
    return found


@pytest.mark.parametrize(("why", "found"), [("none", OLD), ("given up", YOUNG), ("too small", YOUNG)])
def test_a_new_task_passes_a_pipeline_that_could_not_train_it(make: Any, why: str, found: Key) -> None:
    assert where(make, make.task(), old(make, why), make.pipeline(YOUNG.name, age=10)) == str(found)


@pytest.mark.parametrize(
    ("story", "why", "status", "fields", "found"),
    [
        ("it waits at one that is too small", "too small", {}, {}, YOUNG),
        ("the other one need not be up for that", "too small", {}, {"up": False}, YOUNG),
        ("it waits at one that is given up", "given up", {}, {}, YOUNG),
        ("the other one is not up, and might be given up, too", "given up", {}, {"up": False}, OLD),
        ("it has made steps, and its checkpoints may be there alone", "given up", {"step": 7}, {}, OLD),
        ("all is well", "none", {}, {}, OLD),
    ],
)
def test_one_that_has_made_no_step_leaves_such_a_pipeline(
    make: Any, story: str, why: str, status: dict[str, Any], fields: dict[str, Any], found: Key
) -> None:
    task = make.task(status={"pipeline": str(OLD), **status})
    assert where(make, task, old(make, why), make.pipeline(YOUNG.name, age=10), **fields) == str(found), story


def test_one_that_workers_may_be_beginning_with_stays(make: Any) -> None:
    held = {"pipeline": str(OLD), "conditions": [make.condition("Admitted", "True")]}
    young = make.pipeline(YOUNG.name, age=10)
    heard = Contact(report=make.report())
    places = [
        where(make, make.task(status=held), old(make, "too small"), young, there=group, heard=heard)
        for group in (make.group(), None)
    ]
    assert places == [str(OLD), str(YOUNG)]


@pytest.mark.parametrize(
    ("story", "pods", "heard", "found"),
    [
        ("its workers are ending", {"deleting": True}, False, OLD),
        ("they end though they were heard", {"deleting": True}, True, OLD),
        ("nobody has heard them yet", {}, False, OLD),
        ("they were heard, and do not have it", {}, True, YOUNG),
        ("they are not ready: they have no plan", {"ready": False}, False, YOUNG),
        ("they never had a node", {"deleting": True, "placed": False}, False, YOUNG),
    ],
)
def test_a_task_leaves_no_workers_that_may_have_it_by_a_former_plan(
    make: Any, story: str, pods: dict[str, bool], heard: bool, found: Key
) -> None:
    """There would be two of it, writing to one place."""
    group = make.group()
    there = replace(group, replicas=0, pods=tuple(replace(pod, **pods) for pod in group.pods))
    out = [make.condition("Admitted", "False", "PipelineFailed"), make.condition("Running", "False")]
    task = make.task(status={"pipeline": str(OLD), "conditions": out})
    at = where(
        make,
        task,
        old(make, "given up"),
        make.pipeline(YOUNG.name, age=10),
        there=there,
        heard=Contact(report=make.report()) if heard else None,
    )
    assert at == str(found), story


def test_where_no_pipeline_could_train_it_it_stays(make: Any) -> None:
    """Else it would go to and fro."""
    small = make.pipeline(YOUNG.name, age=10, status=known(make), memory={"budget": "50Mi"})
    for bound in (OLD, YOUNG):
        task = make.task(status={"pipeline": str(bound)})
        assert where(make, task, old(make, "too small"), small, up=False) == str(bound)
