"""What one namespace may have of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact

ACCEPTED = ("Accepted", "True", "Accepted")


def decided(make: Any, tasks: list[Any], reported: list[Any], **limits: Any) -> Any:
    pipeline = make.pipeline(allowedNamespaces={"from": "All"}, namespaceLimits=limits)
    contact = Contact(report=make.report(*reported))
    snapshot = make.snapshot(*tasks, pipelines=(pipeline,), group=make.group(), contact=contact)
    return decide(snapshot, make.settings(serving={"namespaces": ["team-a"]}), make.now)


def admitted(made: Any) -> set[str]:
    return {task.name for plan in made.plans.values() for task in plan.tasks if task.admitted}


def named(make: Any, names: str, namespace: str = "team-a", phase: str = "Prepared", **fields: Any) -> Any:
    tasks = [make.task(name, namespace, age=90 - number, **fields) for number, name in enumerate(names)]
    return tasks, [make.reported(phase, name, namespace) for name in names]


def test_without_limits_all_that_fit_train(make: Any) -> None:
    assert admitted(decided(make, *named(make, "abc"))) == {"a", "b", "c"}


def test_of_a_namespace_so_many_train_and_the_next_one_is_told_why(make: Any) -> None:
    made = decided(make, *named(make, "abc"), training=2)
    assert admitted(made) == {"a", "b"}
    last = next(status for key, status in made.task_statuses.items() if key.name == "c")
    assert (last.state, last.reason) == ("Queued", "NamespaceLimitReached")
    message = last.conditions[1].message
    assert message.startswith("2 tasks of its namespace are already training")
    assert "spec.namespaceLimits.training" in message


def test_a_namespace_at_its_limit_holds_no_other_up(make: Any) -> None:
    tasks, reports = named(make, "abc")
    others, told = named(make, "x", "team-b")
    assert admitted(decided(make, tasks + others, reports + told, training=1)) == {"a", "x"}


def test_who_is_inside_counts_and_stays_when_the_limit_is_lowered(make: Any) -> None:
    tasks, reports = named(make, "ab", phase="Training")
    more, told = named(make, "c", priority=99)
    made = decided(make, tasks + more, reports + told, training=1)
    assert admitted(made) == {"a", "b"}


def test_the_higher_priority_goes_first_within_the_limit(make: Any) -> None:
    tasks, reports = named(make, "ab")
    high, told = named(make, "c", priority=9)
    assert admitted(decided(make, tasks + high, reports + told, training=1)) == {"c"}


@pytest.mark.parametrize(("most", "kept"), [(1, "a"), (2, "ab"), (9, "abc")])
def test_a_namespaces_queue_is_no_longer_than_the_limit(make: Any, most: int, kept: str) -> None:
    tasks, _ = named(make, "abc")
    made = decided(make, tasks, [], waiting=most)
    said = {key.name: status for key, status in made.task_statuses.items()}
    assert {name for name, status in said.items() if status.conditions[0].status == "True"} == set(kept)
    for name in set("abc") - set(kept):
        assert (said[name].state, said[name].reason) == ("Queued", "NamespaceLimitReached")
        assert (
            f"{most} tasks of namespace team-a already wait for team-a/toy"
            in said[name].conditions[0].message
        )


def test_who_trains_is_not_in_the_queue(make: Any) -> None:
    tasks, reports = named(make, "a", phase="Training")
    more, _ = named(make, "b")
    made = decided(make, tasks + more, reports, waiting=1)
    assert {status.conditions[0].status for status in made.task_statuses.values()} == {"True"}


def test_who_is_in_the_queue_stays_there_whoever_comes(make: Any) -> None:
    held = {"conditions": [make.condition(*ACCEPTED)]}
    tasks, _ = named(make, "a", status=held)
    more, _ = named(make, "b", priority=99)
    made = decided(make, tasks + more, [], waiting=1)
    said = {key.name: status.conditions[0].status for key, status in made.task_statuses.items()}
    assert said == {"a": "True", "b": "False"}


def test_each_namespace_has_a_queue_of_its_own(make: Any) -> None:
    tasks, _ = named(make, "a")
    others, _ = named(make, "x", "team-b")
    made = decided(make, tasks + others, [], waiting=1)
    assert {status.conditions[0].status for status in made.task_statuses.values()} == {"True"}


@pytest.mark.parametrize("limit", ["training", "waiting"])
def test_a_limit_that_lets_nobody_in_is_refused(make: Any, limit: str) -> None:
    pipeline = make.pipeline(namespaceLimits={limit: 0})
    assert pipeline.spec is None
    assert f"spec.namespaceLimits.{limit}" in pipeline.problem
