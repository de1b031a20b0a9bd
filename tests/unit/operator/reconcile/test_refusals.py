"""A task that does not fit the base model is refused as soon as the model's shape is known, and no worker runs for it."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact, Key

TASK, PIPELINE = Key("team-a", "t1"), Key("team-a", "toy")

MISFITS = [
    (
        "a rank above a module's smaller side",
        {"lora": {"rank": 65, "targetModules": ["q_proj"]}},
        "InvalidSpec",
        "rank 65 is larger than the smaller side of q_proj (64 x 64): use at most 64",
    ),
    (
        "a module that the model has not",
        {"lora": {"targetModules": ["c_attn"]}},
        "UnknownTargetModule",
        "targetModules: c_attn is not a linear module",
    ),
    (
        "rows longer than the model's positions",
        {"training": {"maxSeqLength": 4096}},
        "InvalidSpec",
        "training.maxSeqLength is 4096, but the base model supports at most 2048 tokens",
    ),
]


def known_shape(make: Any) -> dict[str, Any]:
    """The status of an idle pipeline whose workers have run before."""
    return {
        "observedGeneration": 1,
        "facts": make.facts().model_dump(mode="json", by_alias=True),
        "stages": [stage.model_dump(mode="json", by_alias=True) for stage in make.stages()],
    }


@pytest.mark.parametrize(("story", "spec", "reason", "words"), MISFITS, ids=[one[0] for one in MISFITS])
def test_with_a_shape_of_old_no_worker_starts_for_it(
    make: Any, story: str, spec: dict[str, Any], reason: str, words: str
) -> None:
    idle = make.pipeline(status=known_shape(make))
    decision = decide(make.snapshot(make.task(**spec), pipelines=(idle,)), make.settings(), make.now)
    status = decision.task_statuses[TASK]
    assert (status.state, status.reason) == ("Failed", reason), story
    failed = next(one for one in status.conditions if one.type == "Failed")
    assert failed.status == "True"
    assert failed.message.startswith(words)
    assert not decision.workers
    assert status.completion_time is not None


def test_a_task_that_fits_starts_the_workers(make: Any) -> None:
    idle = make.pipeline(status=known_shape(make))
    decision = decide(make.snapshot(make.task(), pipelines=(idle,)), make.settings(), make.now)
    assert decision.workers[PIPELINE].replicas == 2


def test_before_the_shape_is_known_nothing_is_refused(make: Any) -> None:
    task = make.task(lora={"rank": 65, "targetModules": ["q_proj"]})
    decision = decide(make.snapshot(task), make.settings(), make.now)
    assert decision.task_statuses[TASK].state == "Pending"


def test_a_live_coordinator_is_not_asked_either(make: Any) -> None:
    contact = Contact(report=make.report())
    bad = make.task(lora={"rank": 65, "targetModules": ["q_proj"]})
    good = make.task("t2")
    decision = decide(
        make.snapshot(bad, good, group=make.group(), contact=contact), make.settings(), make.now
    )
    assert decision.task_statuses[TASK].state == "Failed"
    assert [task.name for task in decision.plans[PIPELINE].tasks] == ["t2"]


def test_a_task_that_trains_is_left_alone(make: Any) -> None:
    """What a running coordinator took is its word, whatever a shape says."""
    contact = Contact(report=make.report(make.reported("Training", step=3)))
    task = make.task(lora={"rank": 65, "targetModules": ["q_proj"]})
    decision = decide(make.snapshot(task, group=make.group(), contact=contact), make.settings(), make.now)
    assert decision.task_statuses[TASK].state == "Training"


def test_a_task_too_large_names_what_takes_the_memory(make: Any) -> None:
    contact = Contact(report=make.report(make.reported("Prepared"), capacity=2_000_000))
    decision = decide(
        make.snapshot(make.task(), group=make.group(), contact=contact), make.settings(), make.now
    )
    status = decision.task_statuses[TASK]
    message = next(one for one in status.conditions if one.type == "Admitted").message
    assert (status.state, status.reason) == ("Rejected", "ExceedsCapacity")
    for figure in (
        "frozen weights 976.56 KiB",
        "adapters ",
        "activations of 16384 tokens",
        "1.81 MiB usable",
    ):
        assert figure in message
