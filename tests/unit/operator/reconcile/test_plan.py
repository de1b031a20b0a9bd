"""Which plan a coordinator gets, and when."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import ConfigMapText, Contact, Key
from mlora_worker.protocol import Plan

FIXTURES = Path(__file__).parents[3] / "fixtures"
TOY = Key("team-a", "toy")
SECRET = Key("team-a", "keys")


def plan(make: Any, *tasks: Any, contact: Contact, **fields: Any) -> Plan | None:
    snapshot = make.snapshot(*tasks, group=make.group(), contact=contact, **fields)
    return decide(snapshot, make.settings(), make.now).plans.get(TOY)


def sent(contact: Contact, taken: Plan | None) -> Contact:
    """The contact after the coordinator has taken a plan."""
    assert taken is not None
    assert contact.report is not None
    report = contact.report
    return replace(contact, sent=taken, sent_run=report.run_id, sent_sequence=report.sequence)


def test_nothing_is_sent_to_a_coordinator_that_does_not_answer(make: Any) -> None:
    assert plan(make, make.task(), contact=Contact()) is None
    lost = Contact(report=make.report(), lost_since=make.now)
    assert plan(make, make.task(), contact=lost) is None


def test_a_plan_names_each_unfinished_task_in_the_schedulers_order(make: Any) -> None:
    tasks = [
        make.task("low", priority=1),
        make.task("high", priority=5),
        make.task("off", suspend=True),
        make.task("done", status={"conditions": [make.condition("Succeeded", "True")]}),
    ]
    found = plan(make, *tasks, contact=Contact(report=make.report(generation=0)))
    assert found is not None
    assert [(one.name, one.priority) for one in found.tasks] == [("high", 5), ("low", 1)]


def test_a_task_plan_is_the_users_spec(make: Any) -> None:
    task = make.task(lora={"rank": 4}, training={"batchSize": 2}, dataset={"fields": {"prompt": "q"}})
    found = plan(make, task, contact=Contact(report=make.report()))
    assert found is not None
    (entry,) = found.tasks
    assert task.spec is not None
    assert (entry.uid, entry.namespace, entry.name) == (task.uid, "team-a", "t1")
    assert (entry.lora, entry.dataset) == (task.spec.lora, task.spec.dataset.for_plan())
    assert entry.training == task.spec.training.for_model(make.facts().max_positions)
    assert (entry.output_uri, entry.base_model, entry.admitted) == ("s3://adapters/t1", "Org/Toy-1B", False)


@pytest.mark.parametrize(
    ("takes", "asked", "longest"),
    [(8192, None, 2048), (1024, None, 1024), (8192, 4096, 4096), (8192, 512, None)],
)
def test_what_a_user_leaves_out_is_said_to_workers_of_all_versions(
    make: Any, takes: int, asked: int | None, longest: int | None
) -> None:
    """A plan's own defaults, which it leaves out, are others: ``[q_proj, v_proj]`` and 512."""
    facts = make.facts().model_copy(update={"max_positions": takes})
    contact = Contact(report=make.report().model_copy(update={"facts": facts}))
    found = plan(make, make.task(training={"maxSeqLength": asked} if asked else {}), contact=contact)
    assert found is not None
    (entry,) = json.loads(found.to_json())["tasks"]
    assert entry["lora"] == {"targetModules": ["all-linear"]}
    assert entry["training"].get("maxSeqLength") == longest


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_a_task_may_replace_is_told_also_when_it_changes(make: Any, overwrite: bool) -> None:
    contact = Contact(report=make.report(make.reported("Saving")))
    task = make.task(output={"overwrite": overwrite})
    found = plan(make, task, contact=contact)
    assert found is not None
    assert found.tasks[0].output_overwrite is overwrite


def test_a_prepared_task_is_admitted_and_stays_so_until_it_is_done(make: Any) -> None:
    admitted = {"conditions": [make.condition("Admitted", "True")], "pipeline": "team-a/toy"}
    for phase, status in (("Prepared", {}), ("Prepared", admitted), ("Training", {}), ("Saving", {})):
        contact = Contact(report=make.report(make.reported(phase)))
        found = plan(make, make.task(status=status), contact=contact)
        assert found is not None
        assert [one.admitted for one in found.tasks] == [True], phase


def test_a_task_that_succeeded_stays_in_the_plan_until_its_status_is_written(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Succeeded")))
    found = plan(make, make.task(), contact=contact)
    assert found is not None
    assert [one.name for one in found.tasks] == ["t1"]


def test_the_same_wish_is_sent_once(make: Any) -> None:
    contact = Contact(report=make.report(generation=0))
    first = plan(make, make.task(), contact=contact)
    assert plan(make, make.task(), contact=sent(contact, first)) is None


def test_the_first_workers_understand_the_plan_of_a_task_that_uses_nothing_newer(make: Any) -> None:
    """They refuse a whole plan for one field that they do not know: nobody on their pipeline would be suspended, let in or
    told that its end is known. The schema is theirs."""
    schema = json.loads((FIXTURES / "protocol" / "first_plan.schema.json").read_text())
    training = {"batchSize": 2, "maxSteps": 9, "maxSeqLength": 256, "checkpointEverySteps": 5}
    task = make.task(
        lora={"rank": 4, "targetModules": ["q_proj"]},
        dataset={"format": "promptCompletion"},
        training=training,
        status={"step": 3, "pipeline": "team-a/toy"},
    )
    told = plan(make, task, contact=Contact(report=make.report(lacks=None)))
    assert told is not None
    jsonschema.validate(json.loads(told.to_json()), schema)
    newer = plan(make, task, contact=Contact(report=make.report(lacks=())))
    assert newer is not None
    assert newer.tasks[0].generation == task.generation


def test_a_new_wish_gets_the_next_generation(make: Any) -> None:
    contact = Contact(report=make.report(generation=0))
    first = plan(make, make.task(), contact=contact)
    assert first is not None
    second = plan(make, make.task(), make.task("t2"), contact=sent(contact, first))
    assert second is not None
    assert second.generation == first.generation + 1


def test_a_restarted_operator_continues_above_what_the_coordinator_has(make: Any) -> None:
    found = plan(make, make.task(), contact=Contact(report=make.report(generation=41)))
    assert found is not None
    assert found.generation == 42


def test_a_restarted_operator_and_coordinator_continue_above_the_status(make: Any) -> None:
    pipeline = make.pipeline(status={"planGeneration": 17})
    contact = Contact(report=make.report(generation=0))
    found = plan(make, make.task(), contact=contact, pipelines=(pipeline,))
    assert found is not None
    assert found.generation == 18


def test_a_restarted_coordinator_gets_the_plan_again(make: Any) -> None:
    contact = Contact(report=make.report(generation=0))
    first = plan(make, make.task(), contact=contact)
    taken = sent(contact, first)
    restarted = replace(taken, report=make.report(run="run-2", sequence=0, generation=0))
    again = plan(make, make.task(), contact=restarted)
    assert again == first


def test_a_report_from_before_the_plan_was_taken_sends_nothing_twice(make: Any) -> None:
    contact = Contact(report=make.report(sequence=5, generation=0))
    first = plan(make, make.task(), contact=contact)
    assert plan(make, make.task(), contact=sent(contact, first)) is None


def test_a_plan_of_someone_else_is_overruled(make: Any) -> None:
    contact = Contact(report=make.report(generation=0))
    first = plan(make, make.task(), contact=contact)
    overruled = replace(sent(contact, first), report=make.report(sequence=9, generation=50))
    again = plan(make, make.task(), contact=overruled)
    assert again is not None
    assert again.generation == 51


def test_keys_are_read_anew_and_a_change_is_sent(make: Any) -> None:
    task = make.task(storage={"secretRef": {"name": "keys"}})
    contact = Contact(report=make.report(generation=0))
    old = {SECRET: {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "old\n"}}
    new = {SECRET: {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "new\n"}}
    first = plan(make, task, contact=contact, secrets=old)
    second = plan(make, task, contact=sent(contact, first), secrets=new)
    assert second is not None
    key = second.tasks[0].storage.secret_key
    assert key is not None
    assert key.get_secret_value() == "new"


def test_a_task_that_trains_keeps_its_keys_while_its_secret_is_away(make: Any) -> None:
    task = make.task(storage={"secretRef": {"name": "keys"}}, status={"pipeline": "team-a/toy"})
    contact = Contact(report=make.report(make.reported("Training")))
    first = plan(
        make,
        task,
        contact=contact,
        secrets={SECRET: {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}},
    )
    assert plan(make, task, contact=sent(contact, first), secrets={SECRET: None}) is None
    # Others come and go meanwhile.
    wider = plan(make, task, make.task("t2"), contact=sent(contact, first), secrets={SECRET: None})
    assert wider is not None
    assert first is not None
    assert wider.tasks[0].storage == first.tasks[0].storage
    assert [one.name for one in wider.tasks] == ["t1", "t2"]
    # A restarted operator does not know the keys: it sends none, and the coordinator keeps those that it has. Others come.
    anew = plan(make, task, make.task("t2"), contact=contact, secrets={SECRET: None})
    assert anew is not None
    assert [one.name for one in anew.tasks] == ["t1", "t2"]
    assert anew.tasks[0].storage.access_key is None


@given(known=st.integers(0, 50), reported=st.integers(0, 50), before=st.integers(0, 50))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_new_generation_is_above_all_that_were_seen(
    make: Any, known: int, reported: int, before: int
) -> None:
    contact = replace(
        Contact(report=make.report(generation=reported)), sent=Plan(generation=before), sent_run="run-1"
    )
    pipeline = make.pipeline(status={"planGeneration": known})
    found = plan(make, make.task(), contact=contact, pipelines=(pipeline,))
    assert found is not None
    assert found.generation == max(known, reported, before) + 1


OLD, NEW = ConfigMapText.of("OLD"), ConfigMapText.of("NEW")


@pytest.mark.parametrize(
    ("step", "kept", "told"), [(30, {OLD.digest}, OLD), (30, set(), NEW), (None, {OLD.digest}, NEW)]
)
def test_a_config_map_that_is_edited_changes_no_task_that_has_begun_even_when_its_workers_start_anew(
    make: Any, step: int | None, kept: set[str], told: ConfigMapText
) -> None:
    """As long as the operator has the text that was sent first. Else what the ConfigMap holds now, rather than nothing."""
    reference = {"uri": None, "configMapRef": {"name": "rows", "key": "r.jsonl"}}
    task = make.task("a", dataset=reference, status={"pipeline": "team-a/toy", "step": step})
    rows = Key("team-a", "rows")

    def plan(held: ConfigMapText, contact: Contact) -> Plan | None:
        snapshot = make.snapshot(
            task,
            group=make.group(),
            contact=contact,
            config_maps={rows: {"r.jsonl": held}},
            texts_kept=frozenset(kept),
        )
        return decide(snapshot, make.settings(), make.now).plans.get(Key("team-a", "toy"))

    trains = make.report(make.reported("Training", "a", step=30))
    sent = plan(OLD, Contact(report=trains))
    assert sent is not None
    now = Contact(report=trains, sent=sent, sent_run="run-1", sent_sequence=1)
    assert plan(NEW, now) is None, "as long as the same workers run"
    lost = make.report(run="run-2", lacks=(OLD.digest,))
    again = plan(NEW, Contact(report=lost, texts_before=now.texts))
    assert again is not None
    assert [one.dataset_digest for one in again.tasks] == [told.digest]


def test_one_that_the_worker_put_out_is_told_so_before_it_is_let_in_again(make: Any) -> None:
    """Also where the scheduler finds at once that it fits: the worker waits for the word."""
    task = make.task("a", status={"pipeline": "team-a/toy", "step": 30})
    said = make.reported("Preempted", "a", step=30)
    told = []
    for out in (True, False):
        report = make.report(said.model_copy(update={"crowded_out": out}))
        snapshot = make.snapshot(task, group=make.group(), contact=Contact(report=report))
        plan = decide(snapshot, make.settings(), make.now).plans[Key("team-a", "toy")]
        told += [one.admitted for one in plan.tasks]
    assert told == [False, True]


def test_workers_that_are_to_be_replaced_hear_of_nobody_new(make: Any) -> None:
    known, new = make.task("known"), make.task("new")
    contact = Contact(report=make.report(make.reported("Training", "known", step=3), generation=0))

    def planned(revision: str, contact: Contact) -> Plan:
        snapshot = make.snapshot(known, new, group=make.group(revision=revision), contact=contact)
        return decide(snapshot, make.settings(), make.now).plans[TOY]

    assert [one.name for one in planned("old", contact).tasks] == ["known"]
    both = planned("new", contact)
    assert [one.name for one in both.tasks] == ["known", "new"]
    anew = make.report(make.reported("Training", "known", step=3), run="run-2", generation=0)
    told = replace(sent(contact, both), report=anew)
    assert [one.name for one in planned("old", told).tasks] == ["known", "new"], "it was told of it before"
