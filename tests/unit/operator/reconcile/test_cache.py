"""What is remembered from decision to decision never shows: each is what it would be without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlora_operator.reconcile.cache import Memo
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.memoize import Memoized
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Contact, Key, Pipeline, Snapshot, Task, WorkerGroup
from mlora_worker.protocol import TaskReport
from tests.fixtures.stories import stories

NAMESPACES = ("team-a", "team-b")
TOY, OTHER = Key("team-a", "toy"), Key("team-a", "other")
KEYS = Key("team-a", "keys")
SECRET = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
PHASES = ("Preparing", "Prepared", "Training", "Training", "Saving", "Preempted", "Succeeded", "Failed")
SPECS: tuple[dict[str, Any], ...] = (
    {},
    {"priority": 10},
    {"suspend": True},
    {"suspend": True, "startDeadlineSeconds": 30},
    {"startDeadlineSeconds": 30},
    {"activeDeadlineSeconds": 30, "ttlSecondsAfterFinished": 20},
    {"output": {"uri": "s3://adapters/shared"}},
    {"output": {"uri": "s3://adapters/shared/below"}},
    {"storage": {"secretRef": {"name": "keys"}}},
    {"storage": {"endpoint": "http://127.0.0.1:9000"}},
    {"baseModel": "Org/Nobody"},
    {"lora": {"rank": 0}},
    {"lora": {"rank": 4096}},
)


@dataclass
class World:
    """What a snapshot is made of. Each step changes one thing, by new objects for it alone."""

    make: Any
    now: datetime
    tasks: dict[Key, Task] = field(default_factory=dict)
    pipelines: dict[Key, Pipeline] = field(default_factory=dict)
    groups: dict[Key, WorkerGroup] = field(default_factory=dict)
    contacts: dict[Key, Contact] = field(default_factory=dict)
    secrets: dict[Key, Any] = field(default_factory=lambda: {KEYS: SECRET})
    recently_written: frozenset[str] = frozenset()
    made: int = 0
    last: Decision = field(default_factory=Decision)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            tasks=tuple(self.tasks.values()),
            pipelines=tuple(self.pipelines.values()),
            groups=dict(self.groups),
            revisions=dict.fromkeys(self.pipelines, "new"),
            contacts=dict(self.contacts),
            secrets=dict(self.secrets),
            recently_written=self.recently_written,
        )

    def some_task(self, which: int) -> Task | None:
        return list(self.tasks.values())[which % len(self.tasks)] if self.tasks else None

    def apply(self, which: int) -> None:
        self.made += 1
        spec, namespace = SPECS[which % len(SPECS)], NAMESPACES[which // 7 % 2]
        age = (self.make.now - self.now).total_seconds()
        task = self.make.task(f"t{self.made}", namespace, age=age, **spec)
        self.tasks[task.key] = task

    def delete(self, which: int) -> None:
        task = self.some_task(which)
        if task is not None:
            self.tasks.pop(task.key)

    def write(self, _: int) -> None:
        """Statuses that were decided on come back as new objects, a second later: what is as it was told is remembered."""
        self.now += timedelta(seconds=1)
        for key, status in self.last.task_statuses.items():
            if key in self.tasks:
                self.made += 1
                read = type(status).model_validate(status.model_dump(by_alias=True))
                self.tasks[key] = replace(self.tasks[key], status=read, version=str(self.made))
                self.recently_written |= {self.tasks[key].uid}

    def write_pipelines(self, _: int) -> None:
        for key, status in self.last.pipeline_statuses.items():
            if key in self.pipelines:
                self.pipelines[key] = replace(self.pipelines[key], status=status)

    def forget_words(self, _: int) -> None:
        self.recently_written = frozenset()

    def read_anew(self, which: int) -> None:
        task = self.some_task(which)
        if task is not None:
            spec = task.spec.model_copy() if task.spec is not None else None
            self.tasks[task.key] = replace(task, spec=spec, generation=task.generation + which % 2)

    def suspend(self, which: int) -> None:
        task = self.some_task(which)
        if task is not None and task.spec is not None:
            spec = task.spec.model_copy(update={"suspend": not task.spec.suspend})
            self.tasks[task.key] = replace(task, spec=spec, generation=task.generation + 1)

    def ask_again(self, which: int) -> None:
        task = self.some_task(which)
        if task is not None:
            self.tasks[task.key] = replace(task, retry=str(which))

    def wait(self, which: int) -> None:
        self.now += timedelta(seconds=(0.2, 1, 16, 100)[which % 4])

    def group(self, which: int) -> None:
        key = (TOY, OTHER)[which % 2]
        make = self.make
        made: WorkerGroup | None = (
            None,
            make.group(),
            make.group(ready=1),
            make.group(revision="old"),
            make.group(ready=0),
        )[which // 2 % 5]
        self.groups.pop(key, None)
        if made is not None:
            self.groups[key] = made

    def hear(self, which: int) -> None:
        """A report of those whom the last plan named, each in some phase; mostly that plan has just been taken."""
        if which % 4:
            self.send(which)
        key = (TOY, OTHER)[which % 2]
        contact = self.contacts.get(key, Contact())
        known = {one.uid: one for one in contact.report.tasks} if contact.report is not None else {}
        reports: list[TaskReport] = []
        for number, one in enumerate(contact.sent.tasks if contact.sent is not None else ()):
            moves = one.uid not in known or (which + number) % 3 == 0
            phase = PHASES[(which + 5 * number) % len(PHASES)]
            moved = self.make.reported(phase, one.name, one.namespace, step=min(which, 50))  # of 50 in all
            reports.append(moved if moves else known[one.uid])
        report = self.make.report(
            *reports,
            run=f"run-{which // 50}",
            sequence=self.made,
            generation=contact.sent.generation if contact.sent is not None else 0,
            capacity=2**33 if which % 5 else 2**24,
        )
        self.contacts[key] = replace(contact, report=report, lost_since=None, error=None, starting=False)

    def send(self, _: int) -> None:
        for key, plan in self.last.plans.items():
            run = self.contacts[key].report
            self.contacts[key] = replace(
                self.contacts[key], sent=plan, sent_run=run.run_id if run is not None else None
            )

    def lose(self, which: int) -> None:
        key = (TOY, OTHER)[which % 2]
        contact = self.contacts.get(key, Contact())
        self.contacts[key] = (
            Contact(lost_since=self.now, error="loads", starting=True)
            if which % 3 == 0
            else replace(contact, lost_since=self.now, error="no answer")
        )

    def secret(self, which: int) -> None:
        self.secrets = ({}, {KEYS: None}, {KEYS: SECRET}, {KEYS: {**SECRET, "HF_TOKEN": "h"}})[which % 4]

    def pipeline(self, which: int) -> None:
        """It comes, goes, or has another spec."""
        key, make = (TOY, OTHER)[which % 2], self.make
        specs: tuple[dict[str, Any] | None, ...] = (
            {},
            {"namespaceLimits": {"waiting": 1}},
            {"namespaceLimits": {"training": 1}},
            {"allowedNamespaces": {"from": "All"}},
            {"stages": 0},
            {"model": {"name": "Org/Nobody", "uri": "s3://models/nobody"}},
            None,
        )
        spec = specs[which // 2 % len(specs)]
        if spec is None:
            self.pipelines.pop(key, None)
        else:
            self.pipelines[key] = make.pipeline(key.name, generation=which + 1, **spec)

    def delete_pipeline(self, which: int) -> None:
        key = (TOY, OTHER)[which % 2]
        if key in self.pipelines:
            self.pipelines[key] = replace(self.pipelines[key], deleting=True)


STEPS: tuple[Callable[[World, int], None], ...] = (
    World.apply,
    World.apply,
    World.delete,
    World.write_pipelines,
    World.forget_words,
    World.read_anew,
    World.suspend,
    World.ask_again,
    World.wait,
    World.wait,
    World.group,
    *(World.hear,) * 6,
    World.send,
    World.lose,
    World.secret,
    World.pipeline,
    World.delete_pipeline,
)


STORIES = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 99), st.booleans()), max_size=16)


@given(STORIES)
@settings(
    max_examples=stories(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_decision_is_the_same_with_what_is_remembered_of_those_before(
    make: Any, story: list[tuple[Callable[[World, int], None], int, bool]]
) -> None:
    world, memo, chosen = World(make, make.now), Memo(), make.settings()
    world.pipelines[TOY] = make.pipeline(allowedNamespaces={"from": "All"})

    def goes_on(step: Callable[[World, int], None], which: int) -> None:
        step(world, which)
        seen = world.snapshot()
        world.last = decide(seen, chosen, world.now, memo)
        assert world.last == decide(seen, chosen, world.now)

    for number in range(len(SPECS)):
        world.apply(number)
    for step, which, written in [(World.wait, 0, True), *story]:
        goes_on(step, which)
        if written:
            goes_on(World.write, 0)
            goes_on(World.wait, 1)


def test_nothing_is_worked_out_again_of_a_task_that_did_not_move(make: Any) -> None:
    group, contact = make.group(), Contact(report=make.report(make.reported("Training", step=3)))
    memo, chosen, later = Memo(), make.settings(), make.now + timedelta(seconds=5)
    snapshot = make.snapshot(make.task(), group=group, contact=contact)
    status = decide(snapshot, chosen, make.now, memo).task_statuses[Key("team-a", "t1")]
    snapshot = replace(snapshot, tasks=(replace(snapshot.tasks[0], status=status),))
    first = decide(snapshot, chosen, later, memo)
    again = decide(snapshot, chosen, later + timedelta(seconds=5), memo)
    assert first.task_statuses == again.task_statuses
    assert all(again.task_statuses[key] is status for key, status in first.task_statuses.items())
    assert not [one for one in (*first.events, *again.events) if one.kind == "LoRATask"]
    key, moved = Key("team-a", "toy"), make.report(make.reported("Training", step=4))
    for contact in (Contact(report=moved), Contact(report=moved, lost_since=make.now, error="no answer")):
        snapshot, later = replace(snapshot, contacts={key: contact}), later + timedelta(seconds=20)
        moves = decide(snapshot, chosen, later, memo)
        assert moves == decide(snapshot, chosen, later)
        assert moves.task_statuses != again.task_statuses


def test_an_answer_is_known_until_what_it_was_made_of_changes_or_nobody_asks() -> None:
    answers: Memoized[str] = Memoized()
    answers.keep("a", (1, "x"), "one")
    assert answers.known("a", (1, "x")) is None, "of this decision nothing is known yet"
    answers.turn()
    assert answers.known("a", (1, "x")) == "one"
    assert answers.known("a", (2, "x")) is None
    assert answers.known("b", (1, "x")) is None
    answers.turn()
    assert answers.known("a", (1, "x")) == "one", "it was asked for"
    answers.turn()
    answers.turn()
    assert answers.known("a", (1, "x")) is None


def test_the_last_answer_is_known_until_nobody_asks_for_it() -> None:
    latest: Memoized[str] = Memoized()
    latest.keep("a", (1,), "one")
    assert latest.last("a") is None, "of this decision nothing is known yet"
    latest.turn()
    assert latest.last("a") == "one"
    latest.keep("a", (2,), "two")
    assert latest.last("a") == "one", "who asks twice in a decision hears the same"
    latest.turn()
    assert (latest.last("a"), latest.last("b")) == ("two", None)
    latest.turn()
    assert latest.last("a") == "two", "it was asked for"
    latest.turn()
    latest.turn()
    assert latest.last("a") is None
