"""Texts of ConfigMaps: named by digest in plans, sent once and when they lack, and kept within a bound."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.reconcile.cluster.config_map_texts import MOST_READS, REFRESHED, ConfigMapTexts, TextGone
from mlora_operator.reconcile.cluster.read_cache import MAX_AGE, ReadCache
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.plan import MOST_BYTES
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.decode import config_maps_wanted
from mlora_operator.reconcile.state.snapshot import ConfigMapText, Contact, Key, Task
from mlora_worker.protocol import Plan

TOY, ROWS = Key("team-a", "toy"), Key("team-a", "rows")
MEBIBYTE = "\x01" * 2**20  # six bytes of JSON each


class ConfigMaps:
    def __init__(self, **data: dict[str, str]) -> None:
        self.data: dict[Key, dict[str, str] | None] = {
            Key("team-a", name): held for name, held in data.items()
        }
        self.now = 0.0
        self.reads: list[str] = []
        self.texts = ConfigMapTexts(self.read, lambda: self.now, most=1000)

    async def read(self, key: Key) -> dict[str, str] | None:
        self.reads.append(key.name)
        return self.data.get(key)

    async def look(self, **wanted: set[str]) -> Any:
        named = {Key("team-a", name): frozenset(keys) for name, keys in wanted.items()}
        return {key.name: held for key, held in (await self.texts.of(named)).items()}


async def test_of_a_config_map_only_what_tasks_name_is_known() -> None:
    maps = ConfigMaps(rows={"a": "one", "b": "two", "c": "three"})
    assert await maps.look(rows={"a", "nothing"}, none={"a"}) == {
        "rows": {"a": ConfigMapText.of("one")},
        "none": None,
    }
    assert maps.texts.kept == {ConfigMapText.of("one").digest}
    assert await maps.look(rows={"a", "b"}) == {
        "rows": {"a": ConfigMapText.of("one"), "b": ConfigMapText.of("two")}
    }, "at once"
    assert maps.reads == ["rows", "none", "rows"]


async def test_as_many_texts_are_kept_as_there_are_bytes_for_and_others_are_read_again() -> None:
    maps = ConfigMaps(**{f"m{number}": {"k": str(number) * 300} for number in range(5)})
    await maps.look(**{f"m{number}": {"k"} for number in range(5)})
    kept = [number for number in range(5) if ConfigMapText.of(str(number) * 300).digest in maps.texts.kept]
    assert kept == [2, 3, 4]
    maps.reads.clear()
    for number in range(5):
        assert await maps.texts.text(ConfigMapText.of(str(number) * 300).digest) == str(number) * 300
        assert len(maps.texts.kept) == 3
    assert maps.reads == [f"m{number}" for number in range(5)]


async def test_a_text_that_was_edited_is_not_sent_for_another_one() -> None:
    maps = ConfigMaps(rows={"k": "before"})
    await maps.look(rows={"k"})
    before = ConfigMapText.of("before").digest
    maps.texts._kept.clear()
    for data in ({"k": "after"}, {"other": "x"}, None):
        maps.data[ROWS] = data
        with pytest.raises(TextGone, match="ConfigMap team-a/rows was edited or deleted"):
            await maps.texts.text(before)
    with pytest.raises(TextGone):
        await maps.texts.text("0" * 64)
    maps.data[ROWS] = {"k": "after"}
    assert await maps.look(rows={"k"}) == {"rows": {"k": ConfigMapText.of("after")}}, (
        "looked at with the next pass"
    )


async def test_many_config_maps_are_read_in_several_passes_the_oldest_first() -> None:
    names = [f"m{number:02d}" for number in range(3 * MOST_READS)]
    maps = ConfigMaps(**{name: {"k": name} for name in names})
    wanted = {name: {"k"} for name in names}
    for part in range(1, 4):
        assert len(await maps.look(**wanted)) == part * MOST_READS
        assert len(maps.texts.later()) == (3 - part) * MOST_READS
    assert await maps.look(**wanted) == {name: {"k": ConfigMapText.of(name)} for name in names}
    assert maps.reads == names
    maps.reads.clear()
    maps.now += MAX_AGE
    for _ in range(3):
        await maps.look(**wanted)
    assert maps.reads == names
    assert not maps.texts.later(), "nothing is unknown"


async def test_large_config_maps_are_read_again_less_often() -> None:
    maps = ConfigMaps(**{f"m{number}": {"k": str(number) + "x" * 2**20} for number in range(48)})
    wanted = {f"m{number}": {"k"} for number in range(48)}
    while maps.texts.later() or not maps.reads:
        await maps.look(**wanted)
    maps.reads.clear()
    maps.now += MAX_AGE
    await maps.look(**wanted)
    assert maps.reads == [], "48 MiB are not read every ten seconds"
    maps.now += 48 * 2**20 / REFRESHED
    await maps.look(**wanted)
    assert len(maps.reads) == MOST_READS


async def test_no_more_is_read_at_once_than_there_are_turns() -> None:
    under_way = most = 0

    async def read(key: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return key

    shelf: ReadCache[int, int] = ReadCache("number", read, lambda: 0.0, at_once=3, most_reads=10)
    assert len(await shelf.get(range(20), lambda _: 1.0)) == 10
    assert (most, len(shelf.later)) == (3, 10)


def test_what_workers_have_prepared_is_not_read_any_more(make: Any) -> None:
    reference = {"uri": None, "configMapRef": {"name": "rows", "key": "k"}}
    tasks = [make.task(name, dataset=reference) for name in ("a", "b")]
    said = make.report(make.reported("Prepared", "a"), make.reported("Preparing", "b"))
    wanted = config_maps_wanted(tasks, {TOY: Contact(report=said)})
    assert wanted == {ROWS: frozenset({"k"})}
    assert config_maps_wanted(tasks[:1], {TOY: Contact(report=said)}) == {}
    lost = Contact(report=said, lost_since=make.now)
    assert config_maps_wanted(tasks[:1], {TOY: lost}) == wanted, "who is silent may come back without"


def named(make: Any, count: int, **spec: Any) -> list[Task]:
    reference = {"uri": None, "configMapRef": {"name": "rows", "key": "k"}}
    return [make.task(f"t{number:02d}", dataset=reference, **spec) for number in range(count)]


def decided(make: Any, tasks: list[Task], contact: Contact, rows: ConfigMapText, **fields: Any) -> Decision:
    snapshot = make.snapshot(
        *tasks, group=make.group(), contact=contact, config_maps={ROWS: {"k": rows}}, **fields
    )
    return decide(snapshot, make.settings(), make.now)


def told(contact: Contact, plan: Plan) -> Contact:
    return replace(contact, sent=plan, sent_run="run-1", sent_sequence=1)


def test_a_mebibyte_that_many_tasks_name_is_not_part_of_any_plan(make: Any) -> None:
    tasks, rows = named(make, 45), ConfigMapText.of(MEBIBYTE)
    contact = Contact(report=make.report(generation=0))
    first = decided(make, tasks, contact, rows)
    plan = first.plans[TOY]
    assert len(plan.tasks) == 45
    assert len(plan.to_json()) < 50_000
    assert first.plan_sizes[TOY] >= len(plan.to_json())
    assert not first.texts, "nobody asks for it yet"
    asks = told(Contact(report=make.report(lacks=(rows.digest,))), plan)
    assert decided(make, tasks, asks, rows).texts == {TOY: (rows.digest,)}
    has = told(Contact(report=make.report()), plan)
    then = decided(make, tasks, has, rows)
    assert not then.texts
    assert not then.plans


def test_nothing_is_sent_that_a_coordinator_was_not_told_of(make: Any) -> None:
    """What a coordinator asks for is its own word, and may be a guess at what others hold."""
    tasks, rows, secret = named(make, 1), ConfigMapText.of("rows"), ConfigMapText.of("of somebody else")
    plan = decided(make, tasks, Contact(report=make.report()), rows).plans[TOY]
    asks = told(Contact(report=make.report(lacks=(secret.digest, rows.digest))), plan)
    assert decided(make, tasks, asks, rows, texts_kept=frozenset({secret.digest})).texts == {
        TOY: (rows.digest,)
    }


def test_workers_of_a_former_version_are_told_of_as_many_tasks_as_their_plans_have_room_for(
    make: Any,
) -> None:
    """They are sent the text with each task that they have not heard of. Never is nobody told of anything."""
    tasks, rows = named(make, 45), ConfigMapText.of(MEBIBYTE)
    first = decided(make, tasks, Contact(report=make.report(lacks=None)), rows)
    room = MOST_BYTES // rows.in_json
    assert room == 2
    assert [task.name for task in first.plans[TOY].tasks] == ["t00", "t01"]
    waiting = [first.task_statuses[task.key] for task in tasks[room:]]
    assert {(status.state, status.reason) for status in waiting} == {("Queued", "PlanLimitReached")}
    assert "the specs of the tasks before it fill the plan of the workers" in waiting[0].conditions[1].message
    heard = make.report(make.reported("Preparing", "t00"), make.reported("Preparing", "t01"), lacks=None)
    then = decided(make, tasks, told(Contact(report=heard), first.plans[TOY]), rows)
    assert [task.name for task in then.plans[TOY].tasks] == ["t00", "t01", "t02", "t03"], "these know it now"


def test_tasks_beyond_a_plans_size_wait_in_their_order(make: Any) -> None:
    inline = {"uri": None, "inline": "\x01" * 65_536}
    tasks = [make.task(f"t{number:02d}", dataset=inline) for number in range(60)]
    late = make.task("late", age=1, priority=5, dataset=inline)
    contact = Contact(report=make.report())
    first = decided(make, [*tasks, late], contact, ConfigMapText.of("x"))
    plan = first.plans[TOY]
    assert MOST_BYTES * 0.9 < len(plan.to_json()) <= MOST_BYTES
    inside = [task.name for task in plan.tasks]
    assert inside == ["late", *sorted(task.key.name for task in tasks)[: len(inside) - 1]]
    over = {key.name for key, status in first.task_statuses.items() if status.reason == "PlanLimitReached"}
    assert over == {task.key.name for task in tasks} - set(inside)
    # Who is there stays, whoever comes before it; and there is room once one has finished.
    earlier = make.task("earlier", priority=9, dataset=inline)
    then = decided(make, [earlier, *tasks, late], told(contact, plan), ConfigMapText.of("x"))
    assert not then.plans
    assert then.task_statuses[earlier.key].reason == "PlanLimitReached"
    gone = [task for task in tasks if task.key.name != "t00"]
    after = decided(make, [earlier, *gone, late], told(contact, plan), ConfigMapText.of("x")).plans[TOY]
    assert [task.name for task in after.tasks] == ["earlier", *(name for name in inside if name != "t00")]


def test_a_template_of_a_config_map_is_no_longer_than_one_in_the_task(make: Any) -> None:
    reference = {"chatTemplateRef": {"name": "rows", "key": "k"}}
    task = make.task(dataset=reference)
    made = decided(make, [task], Contact(report=make.report()), ConfigMapText.of("x" * (4 * 65_536 + 1)))
    status = made.task_statuses[task.key]
    assert (status.state, status.reason) == ("Rejected", "InvalidSpec")
    assert "spec.dataset.chatTemplateRef: the text has 262145 bytes" in status.conditions[0].message


@pytest.mark.parametrize("kind", ["Secret", "ConfigMap"])
def test_what_is_read_with_a_later_pass_is_not_called_unreadable(make: Any, kind: str) -> None:
    spec = (
        {"storage": {"secretRef": {"name": "rows"}}}
        if kind == "Secret"
        else {"dataset": {"uri": None, "configMapRef": {"name": "rows", "key": "k"}}}
    )
    task = make.task(**spec)
    waits = make.snapshot(task, later=frozenset({(kind, ROWS)}))
    assert decide(waits, make.settings(), make.now).task_statuses[task.key] == task.status
    failed = decide(make.snapshot(task), make.settings(), make.now).task_statuses[task.key]
    assert failed.reason == "ReadError"
