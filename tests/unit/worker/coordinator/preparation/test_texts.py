"""Texts that plans name by digest: asked for when they are needed, a few at a time, and kept no longer than that."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestClient, TestServer

from mlora_worker.coordinator.http.server import coordinator_app
from mlora_worker.coordinator.parts import CoordinatorParts
from mlora_worker.coordinator.preparation.prepare import BaseModel
from mlora_worker.coordinator.preparation.texts import AT_ONCE
from mlora_worker.coordinator.service import Coordinator
from mlora_worker.protocol import (
    Dataset,
    LoRAConfig,
    Plan,
    Report,
    StageReport,
    TaskPhase,
    TaskPlan,
    Training,
)
from mlora_worker.storage.artifacts.adapter import fingerprint
from mlora_worker.storage.errors import AccessRefused
from tests.fixtures.inline import Waiting, after, inline_pool, pool
from tests.fixtures.makers import NoRows

ROWS = "\n".join('{"prompt": "a", "completion": "b"}' for _ in range(9))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def plan(uid: str, rows: str | None = None, template: str | None = None) -> TaskPlan:
    """One that names its texts by digest."""
    dataset: dict[str, Any] = {"inline": "{}"}
    if rows is not None:
        dataset = {"configMapRef": {"name": "rows", "key": "k"}}
    if template is not None:
        dataset["chatTemplateRef"] = {"name": "templates", "key": "k"}
    return TaskPlan(
        uid=uid, namespace="n", name=uid, base_model="m", lora=LoRAConfig(),
        dataset=Dataset.model_validate(dataset), training=Training(), output_uri="s3://b/p",
        dataset_digest=digest(rows) if rows is not None else None,
        template_digest=digest(template) if template is not None else None,
    )  # fmt: skip


class Stage:
    """A coordinator whose preparing threads take what is begun when the test says so."""

    def __init__(self) -> None:
        self.threads = Waiting()
        self.opened: list[Any] = []
        parts = CoordinatorParts(
            base=cast(BaseModel, SimpleNamespace(facts=None)),
            stages=(
                StageReport(
                    stage=0, first_layer=0, last_layer=1, device="cpu", resident_bytes=0, capacity_bytes=0
                ),
            ),
            run_id="run",
            microbatch_tokens=100,
            open_store=self.open,
            rows=NoRows(),
            announce=lambda *_: None,
            preparing=pool(self.threads, 1000),
            resuming=inline_pool(),
            storing=inline_pool(),
            end=pytest.fail,
            clock=lambda: 0.0,
            later=after(lambda _: None),
        )
        self.one = Coordinator(parts, threading.Condition(threading.RLock()))
        self.generation = 0

    def open(self, access: Any) -> Any:
        self.opened.append(access)
        raise AccessRefused("no")

    def say(self, *plans: TaskPlan) -> None:
        self.generation += 1
        assert self.one.set_plan(Plan(generation=self.generation, tasks=plans))

    def give(self, *texts: str) -> None:
        for text in texts:
            self.one.take_text(digest(text), text)

    @property
    def report(self) -> Report:
        return self.one.wait_report(-1, 0)

    @property
    def lacks(self) -> tuple[str, ...]:
        lacks = self.report.lacks
        assert lacks is not None
        return lacks

    @property
    def plans(self) -> Mapping[str, TaskPlan]:
        return {uid: task.plan for uid, task in self.one._tasks.items()}


def test_one_text_serves_all_that_name_it_and_nothing_begins_without_it() -> None:
    stage = Stage()
    stage.say(*(plan(f"t{number}", ROWS) for number in range(45)), plan("inline"))
    assert stage.lacks == (digest(ROWS),)
    assert len(stage.threads.waiting) == 1, "the one that names none"
    stage.give(ROWS)
    assert stage.lacks == ()
    assert len(stage.threads.waiting) == 46
    assert {id(one.dataset_text) for uid, one in stage.plans.items() if uid != "inline"} == {
        id(stage.plans["t0"].dataset_text)
    }
    assert all(task.phase is TaskPhase.PREPARING for task in stage.report.tasks)


def test_texts_are_asked_for_in_the_order_of_the_plan_and_few_at_a_time() -> None:
    stage = Stage()
    names = [f"t{number}" for number in range(40)]
    stage.say(*(plan(name, name) for name in names))
    assert stage.lacks == tuple(map(digest, names[:AT_ONCE]))
    stage.say(*(plan(name, name) for name in reversed(names)))
    assert stage.lacks == tuple(map(digest, names[::-1][:AT_ONCE]))
    stage.give(*names[::-1][:AT_ONCE])
    assert stage.lacks == (), "no more before some of these are prepared"
    stage.threads.run()
    assert [task.phase for task in stage.report.tasks].count(TaskPhase.FAILED) == AT_ONCE
    assert stage.lacks == tuple(map(digest, names[::-1][AT_ONCE : 2 * AT_ONCE]))


def test_a_task_with_rows_and_a_template_waits_for_both() -> None:
    stage = Stage()
    stage.say(plan("a", ROWS, "{{ messages }}"))
    assert set(stage.lacks) == {digest(ROWS), digest("{{ messages }}")}
    stage.give(ROWS)
    assert stage.lacks == (digest("{{ messages }}"),)
    stage.give("{{ messages }}")
    assert (stage.plans["a"].dataset_text, stage.plans["a"].chat_template) == (ROWS, "{{ messages }}")
    assert len(stage.threads.waiting) == 1


def test_what_nobody_lacks_is_not_kept() -> None:
    stage = Stage()
    stage.say(plan("a", ROWS))
    stage.give("something else", ROWS, ROWS, "and more")
    texts = stage.one._texts
    assert (texts._here, len(stage.threads.waiting)) == ({}, 1)


def test_a_text_that_waits_for_another_text_of_its_task_is_given_up_with_it() -> None:
    stage = Stage()
    stage.say(plan("a", ROWS, "t"), plan("b", "other"))
    stage.give(ROWS)
    stage.say(plan("b", "other"))
    stage.give("other")
    assert stage.one._texts._here == {}
    assert stage.lacks == ()


def test_a_task_that_waits_takes_the_text_that_a_later_plan_names() -> None:
    """Its ConfigMap was edited before anybody could send what it held."""
    stage = Stage()
    stage.say(plan("a", "before"))
    stage.say(plan("a", "after"))
    assert stage.lacks == (digest("after"),)
    stage.give("before", "after")
    assert stage.plans["a"].dataset_text == "after"


def test_a_text_that_is_here_stays_whatever_later_plans_name() -> None:
    stage = Stage()
    stage.say(plan("a", ROWS, "t"))
    stage.give(ROWS, "t")
    stage.say(plan("a", "edited", "edited, too"))
    assert stage.lacks == ()
    assert (stage.plans["a"].dataset_text, stage.plans["a"].template_text) == (ROWS, "t")
    stage.say(plan("a").model_copy(update={"dataset": plan("a", ROWS, "t").dataset}))
    assert (stage.plans["a"].dataset_text, stage.plans["a"].template_text) == (ROWS, "t")


def test_rows_are_not_kept_once_they_are_prepared_and_the_fingerprint_stays() -> None:
    """What an adapter is known by holds its rows: a worker of before, which was sent them in its plan, finds it again."""
    stage = Stage()
    named = plan("a", ROWS, "t")
    in_plan = named.with_texts({digest(ROWS): ROWS, digest("t"): "t"})
    assert in_plan.digests == ()
    stage.say(named)
    stage.give(ROWS, "t")
    assert fingerprint(stage.plans["a"]) == fingerprint(in_plan)
    stage.threads.run()
    assert stage.report.tasks[0].failure is not None
    kept = stage.plans["a"]
    assert (kept.dataset_text, kept.template_text) == (None, "t")
    assert fingerprint(kept) == fingerprint(in_plan)
    stage.say(named.model_copy(update={"priority": 7}))
    assert (stage.plans["a"].priority, stage.plans["a"].dataset_text) == (7, None)
    assert fingerprint(stage.plans["a"]) == fingerprint(in_plan)


def test_texts_in_a_plan_are_taken_as_ever() -> None:
    """An operator of a former version knows of no digests."""
    stage = Stage()
    stage.say(plan("a", ROWS).model_copy(update={"dataset_text": ROWS, "dataset_digest": None}))
    assert stage.lacks == ()
    assert len(stage.threads.waiting) == 1


@pytest.mark.parametrize(
    ("body", "name", "status"),
    [
        (ROWS.encode(), digest(ROWS), 204),
        ("ä".encode(), digest("ä"), 204),
        (b"other", digest(ROWS), 422),
        (b"\xff\xfe", hashlib.sha256(b"\xff\xfe").hexdigest(), 422),
        (b"x" * (4 * 2**20 + 1), "0" * 64, 413),
        (ROWS.encode(), "0" * 63, 404),
        (ROWS.encode(), digest(ROWS).upper(), 404),
    ],
)
async def test_a_text_is_the_one_that_its_digest_says(body: bytes, name: str, status: int) -> None:
    stage = Stage()
    stage.say(plan("a", ROWS), plan("b", "ä"))
    app = coordinator_app(lambda: stage.one, lambda: "t")
    async with TestClient(TestServer(app), headers={"Authorization": "Bearer t"}) as client:
        answer = await client.put(f"/v1/texts/{name}", data=body)
        assert answer.status == status
        assert len(stage.threads.waiting) == (status == 204)
        assert (await client.put(f"/v1/texts/{name}", data=body, headers={"Authorization": ""})).status in (
            401,
            404,
        )


def test_a_reader_of_a_former_format_is_not_told_what_is_lacking() -> None:
    stage = Stage()
    stage.say(plan("a", ROWS))
    report = stage.report
    assert report.lacks == (digest(ROWS),)
    assert "lacks" in report.as_understood_by(3).to_json()
    for former in (1, 2):
        assert "lacks" not in report.as_understood_by(former).to_json()
    assert Report.model_validate_json(report.as_understood_by(2).to_json()).lacks is None
