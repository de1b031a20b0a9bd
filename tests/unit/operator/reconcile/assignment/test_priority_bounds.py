"""A priority that reaches other namespaces' tasks is a right that the platform gives."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.reconcile import decide as decide_module
from mlora_operator.reconcile.assignment.priority_bounds import bound_of
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact, Key
from mlora_operator.settings import Settings
from tests.unit.operator.reconcile.test_preemption import BIG, contact

EVERYBODY = {"from": "All"}
PRIORITY = {"policy": "priority"}
SHORTEST = {"policy": "shortestRemaining"}
TEAM_B = {"namespaces": {"team-b": {"max": 50}}}
OTHERS = {"default": {"max": 9}}


def settings(make: Any, priorities: Any = None, **fields: Any) -> Settings:
    """team-a may serve others; the operator is in mlora-system."""
    made: Settings = make.settings(serving={"namespaces": ["team-a"]}, priorities=priorities or {}, **fields)
    return made


@pytest.mark.parametrize(
    ("story", "chart", "pipeline", "namespace", "most"),
    [
        ("fair shares bound nobody", {}, {}, "team-b", None),
        ("where priorities reach others, a guest has none above 0", {}, {"scheduling": PRIORITY}, "team-b", 0),
        ("the shortest first reaches others, too", {}, {"scheduling": SHORTEST}, "team-b", 0),
        ("a namespace's own pipeline is its own affair", {}, {"scheduling": PRIORITY}, "team-a", None),
        ("the chart gives a namespace more", TEAM_B, {"scheduling": PRIORITY}, "team-b", 50),
        ("and only that one", TEAM_B, {"scheduling": PRIORITY}, "team-c", 0),
        ("it holds where fair shares are, too", TEAM_B, {}, "team-b", 50),
        ("the chart's default is for all guests", OTHERS, {"scheduling": PRIORITY}, "team-c", 9),
        ("not for a namespace's own pipelines", OTHERS, {"scheduling": PRIORITY}, "team-a", None),
        ("whom the chart names it names everywhere", {"namespaces": {"team-a": {"max": 7}}}, {}, "team-a", 7),
        ("a name goes before the default", {**TEAM_B, **OTHERS}, {}, "team-b", 50),
        ("the pipeline gives a namespace more", {}, {"scheduling": PRIORITY, "priorities": TEAM_B}, "team-b", 50),
        ("the pipeline's default is for all guests", {}, {"priorities": OTHERS}, "team-c", 9),
        ("of both the lower one holds: the chart's", OTHERS, {"priorities": TEAM_B}, "team-b", 9),
        ("or the pipeline's", TEAM_B, {"priorities": OTHERS}, "team-b", 9),
        ("a bound below 0", {"default": {"max": -5}}, {}, "team-b", -5),
    ],
)  # fmt: skip
def test_the_highest_priority(
    make: Any, story: str, chart: Any, pipeline: Any, namespace: str, most: int | None
) -> None:
    spec = make.pipeline(allowedNamespaces=EVERYBODY, **pipeline).spec
    found = bound_of(spec, "team-a", namespace, settings(make, chart).rights)
    assert (found.most if found is not None else None) == most, story


def decided(make: Any, *tasks: Any, reports: Any = (), chart: Any = None, **pipeline: Any) -> Any:
    pipelines = (make.pipeline(allowedNamespaces=EVERYBODY, **pipeline),)
    contact = Contact(report=make.report(*reports))
    snapshot = make.snapshot(*tasks, pipelines=pipelines, group=make.group(), contact=contact)
    return decide(snapshot, settings(make, chart), make.now)


def accepted(made: Any, name: str = "t1", namespace: str = "team-b") -> tuple[str, str, str]:
    first = made.task_statuses[Key(namespace, name)].conditions[0]
    return first.status, first.reason, first.message


def test_a_priority_above_its_bound_is_refused_and_the_message_says_all_about_it(make: Any) -> None:
    task = make.task("t1", "team-b", priority=1_000_000)
    made = decided(make, task, scheduling=PRIORITY)
    status, reason, message = accepted(made)
    assert (status, reason) == ("False", "PriorityNotAllowed")
    assert made.task_statuses[task.key].state == "Rejected"
    assert message == (
        "spec.priority: 1000000 is above 0, the most that tasks of namespace team-b may have here (the pipeline's "
        "scheduling.policy, priority, lets priorities reach other namespaces' tasks, and neither its spec.priorities nor "
        "priorities in the values of the operator's chart gives team-b more): set it to 0 or less, nothing else has to "
        "be done, or ask the platform team for a higher bound"
    )
    assert not any(plan.tasks for plan in made.plans.values())


@pytest.mark.parametrize(
    ("chart", "pipeline", "source"),
    [
        (TEAM_B, {}, "(priorities.namespaces.team-b.max in the values of the operator's chart)"),
        (OTHERS, {}, "(priorities.default.max in the values of the operator's chart)"),
        ({}, {"priorities": TEAM_B}, "(spec.priorities.namespaces.team-b.max of the pipeline)"),
        ({}, {"priorities": OTHERS}, "(spec.priorities.default.max of the pipeline)"),
    ],
)
def test_the_message_says_whose_bound_it_is(make: Any, chart: Any, pipeline: Any, source: str) -> None:
    made = decided(make, make.task("t1", "team-b", priority=51), chart=chart, **pipeline)
    assert source in accepted(made)[2]


def test_the_very_bound_is_allowed_and_a_lowered_priority_is_taken_up(make: Any) -> None:
    refused = {"conditions": [make.condition("Accepted", "False", "PriorityNotAllowed")]}
    task = make.task("t1", "team-b", priority=50, status=refused)
    assert accepted(decided(make, task, chart=TEAM_B, scheduling=PRIORITY))[:2] == ("True", "Accepted")


def test_no_pipeline_of_the_catalogue_is_made_for_one_that_is_too_high(make: Any) -> None:
    model = {"name": make.model, "uri": "s3://models/toy", "scheduling": PRIORITY}
    for priority, names in ((1, []), (0, [make.model])):
        task = make.task("t1", "team-b", priority=priority)
        made = decide(make.snapshot(task, pipelines=()), settings(make, models=[model]), make.now)
        assert [one["spec"]["model"]["name"] for one in made.new_pipelines] == names
        assert accepted(made)[1] == ("PriorityNotAllowed" if priority else "CreatingPipeline")


def test_one_that_trains_stays_and_counts_for_no_more_than_it_may(make: Any) -> None:
    """Else it would be raised once it is in, so that nobody could send it away."""
    held = [make.condition("Accepted", "True", "Accepted"), make.condition("Admitted", "True", "Admitted")]
    status = {"conditions": held, "pipeline": "team-a/toy", "run": "run-1"}
    task = make.task("t1", "team-b", priority=99, status=status)
    made = decided(make, task, reports=[make.reported("Training", "t1", "team-b")], scheduling=PRIORITY)
    truth, reason, message = accepted(made)
    assert (truth, reason) == ("True", "Accepted")
    assert message.startswith("served by pipeline team-a/toy; spec.priority 99 counts as 0 while it trains, ")
    assert message.endswith("set it to 0 or less, or it is not admitted again after it leaves the pipeline")
    (plan,) = made.plans.values()
    assert [(one.admitted, one.priority) for one in plan.tasks] == [(True, 0)]


def test_it_is_sent_away_by_what_goes_before_its_bound(make: Any) -> None:
    held = [make.condition("Accepted", "True", "Accepted"), make.condition("Admitted", "True", "Admitted")]
    status = {"conditions": held, "pipeline": "team-a/toy", "run": "run-1"}
    raised = make.task("raised", "team-b", priority=99, training=BIG, status=status)
    own = make.task("own", "team-a", priority=1, training=BIG)
    said = contact(make, make.reported("Training", "raised", "team-b"), make.reported("Prepared", "own"))
    pipelines = (make.pipeline(allowedNamespaces=EVERYBODY, scheduling=PRIORITY),)
    snapshot = make.snapshot(raised, own, pipelines=pipelines, group=make.group(), contact=said)
    made = decide(snapshot, settings(make), make.now)
    assert made.task_statuses[raised.key].reason == "Preempted"


# --- fair shares by default -------------------------------------------------------------------------------------------


def admitted(make: Any, *tasks: Any, **pipeline: Any) -> set[str]:
    """Of tasks that wait where there is room for one."""
    said = contact(make, *(make.reported("Prepared", one.key.name, one.key.namespace) for one in tasks))
    pipelines = (make.pipeline(allowedNamespaces=EVERYBODY, **pipeline),)
    snapshot = make.snapshot(*tasks, pipelines=pipelines, group=make.group(), contact=said)
    made = decide(snapshot, settings(make, {"default": {"max": 1_000_000}}), make.now)
    return {one.name for plan in made.plans.values() for one in plan.tasks if one.admitted}


@pytest.mark.parametrize(
    ("story", "namespaces", "pipeline", "expected"),
    [
        ("of one namespace, the higher priority", ("team-b", "team-b"), {}, "high"),
        ("of two, whoever was there first, since neither was served", ("team-b", "team-c"), {}, "old"),
        ("of two, the higher priority where the pipeline says so", ("team-b", "team-c"), {"scheduling": PRIORITY}, "high"),
        ("the pipeline's own namespace has no more than others", ("team-b", "team-a"), {}, "old"),
    ],
)  # fmt: skip
def test_whose_turn_it_is_where_a_pipeline_says_nothing(
    make: Any, story: str, namespaces: tuple[str, str], pipeline: Any, expected: str
) -> None:
    old = make.task("old", namespaces[0], training=BIG, age=90)
    high = make.task("high", namespaces[1], training=BIG, age=1, priority=1_000_000)
    assert admitted(make, old, high, **pipeline) == {expected}, story


def test_what_is_told_first_follows_no_priority_of_another_namespace(make: Any) -> None:
    """A plan has a size, and who comes first has room in it."""
    first = make.task("first", "team-b", age=90)
    high = [make.task(name, "team-c", age=age, priority=10 * age) for name, age in (("x", 1), ("y", 2))]
    shared, alone = (
        decided(make, first, *high, chart={"default": {"max": 1_000_000}}, scheduling=scheduling)
        for scheduling in ({}, PRIORITY)
    )
    assert [one.name for one in shared.plans[Key("team-a", "toy")].tasks] == ["first", "y", "x"]
    assert [one.name for one in alone.plans[Key("team-a", "toy")].tasks] == ["y", "x", "first"]


def test_priorities_of_ones_own_pipelines_reach_other_pipelines_as_the_chart_says(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room for the workers of one pipeline, the older demand is one that nobody has raised."""
    asked = []
    monkeypatch.setattr(decide_module, "turns", lambda *given: asked.append(given[2]) or {})
    decided(make, make.task("t1", "team-b"), chart={"namespaces": {"team-d": {"max": 5}}})
    assert [asked[0](one) for one in ("team-b", "team-d", "team-a", "mlora-system")] == [0, 5, None, None]
