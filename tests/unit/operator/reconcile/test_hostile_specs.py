"""A task may say whatever its schema allows: that ends no pass, and costs the other tasks little."""

from __future__ import annotations

import cProfile
from typing import Any

from mlora_operator.reconcile.admission.spec_checks import SpecChecks
from mlora_operator.reconcile.cache import Memo
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact, Key, Task


def test_names_that_are_long_and_unknown_fail_their_task_and_not_the_pass(make: Any) -> None:
    """Named one by one, they are more than a failure has room for."""
    task = make.task(lora={"targetModules": [f"x{number:02d}" * 80 for number in range(64)]})
    contact = Contact(report=make.report())
    snapshot = make.snapshot(task, make.task("other"), group=make.group(), contact=contact)
    statuses = decide(snapshot, make.settings(), make.now).task_statuses
    assert statuses[task.key].reason == "UnknownTargetModule"
    assert len(statuses) == 2


def crowd(make: Any, count: int, first: int = 0) -> list[Task]:
    """Each has patterns of its own, so that nothing of one is known from another."""
    return [
        make.task(f"t{number}", lora={"targetModules": [f"layers.*[a{number % 10}].{{0,{number}}}q.*"]})
        for number in range(first, first + count)
    ]


def test_a_decision_looks_into_as_many_new_specs_as_its_allowance_allows(make: Any) -> None:
    tasks = crowd(make, 30)
    snapshot = make.snapshot(*tasks, group=make.group(), contact=Contact(report=make.report()))
    memo, left = Memo(spec_checks=SpecChecks(most=200_000)), []
    for _ in range(100):
        made = decide(snapshot, make.settings(), make.now, memo)
        left.append(len(made.unjudged))
        if not made.unjudged:
            break
        assert {made.task_statuses[task.key].state for task in tasks if task.uid in made.unjudged} == {None}
    assert len(left) > 3
    assert left == sorted(set(left), reverse=True), "each decision looks into some more"
    whole = decide(snapshot, make.settings(), make.now)
    assert made.task_statuses == whole.task_statuses
    assert made.plans == whole.plans


def test_who_asks_for_little_goes_first(make: Any) -> None:
    heavy, plain = crowd(make, 20), make.task("plain", age=1)
    contact = Contact(report=make.report())
    snapshot = make.snapshot(*heavy, plain, group=make.group(), contact=contact)
    made = decide(snapshot, make.settings(), make.now, Memo(spec_checks=SpecChecks(most=50_000)))
    assert made.unjudged
    assert plain.uid not in made.unjudged
    assert made.task_statuses[plain.key].state is not None


def test_who_trains_is_looked_into_whatever_it_takes(make: Any) -> None:
    """An operator that starts knows of nobody. Who trains keeps its place, though there is time for nobody else."""
    status = {"conditions": [make.condition("Accepted", "True"), make.condition("Admitted", "True")]}
    inside = [
        make.task(
            f"inside{number}", status=status | {"pipeline": "team-a/toy"}, lora=task.spec.lora.model_dump()
        )
        for number, task in enumerate(crowd(make, 3, first=100))
    ]
    reported = [make.reported("Training", f"inside{number}", step=3) for number in range(3)]
    contact = Contact(report=make.report(*reported))
    snapshot = make.snapshot(*crowd(make, 30), *inside, group=make.group(), contact=contact)
    made = decide(snapshot, make.settings(), make.now, Memo(spec_checks=SpecChecks(most=0, left=0)))
    assert len(made.unjudged) == 29, "one of those who wait is looked into all the same"
    admitted = {task.name for task in made.plans[Key("team-a", "toy")].tasks if task.admitted}
    assert admitted == {"inside0", "inside1", "inside2"}


def test_patterns_that_no_model_could_be_asked_for_are_refused_before_any_worker_starts(make: Any) -> None:
    task = make.task(lora={"rankPattern": {"(?<=q)_proj": 4}})
    made = decide(make.snapshot(task), make.settings(), make.now)
    status = made.task_statuses[task.key]
    assert (status.state, status.reason) == ("Rejected", "InvalidSpec")
    assert status.conditions[0].message.startswith(
        "spec.lora.rankPattern: (?<=q)_proj is not a valid pattern: it looks"
    )
    assert not made.workers


def test_a_task_that_a_former_operator_accepted_keeps_what_it_has(make: Any) -> None:
    """Whatever it names: what it trains is there."""
    status = {"conditions": [make.condition("Accepted", "True")], "pipeline": "team-a/toy"}
    task = make.task(lora={"rankPattern": {"(?<=q)_proj": 4}}, status=status)
    contact = Contact(report=make.report(make.reported("Training", step=3)))
    made = decide(make.snapshot(task, group=make.group(), contact=contact), make.settings(), make.now)
    assert made.task_statuses[task.key].state == "Training"


def test_many_pipelines_and_many_tasks_are_no_million_of_questions(make: Any) -> None:
    """Of a tenant that makes both: tasks that are not understood, and tasks for a model that nobody serves."""

    def calls(count: int) -> int:
        pipelines = tuple(
            make.pipeline(f"p{number}", model={"name": f"M{number}", "uri": "s3://m/x"})
            for number in range(count)
        )
        wrong = [make.task(f"w{number}", lora={"rank": -1}) for number in range(count)]
        unserved = [make.task(f"u{number}", baseModel="nobody/s") for number in range(count)]
        snapshot = make.snapshot(*wrong, *unserved, pipelines=pipelines)
        profile = cProfile.Profile()
        profile.runcall(decide, snapshot, make.settings(), make.now)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(200) < 2.5 * calls(100)
