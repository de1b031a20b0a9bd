"""Whoever may write statuses, or another version of the operator, may leave nonsense there: it stops nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.api.schema import structural
from mlora_operator.api.task import TaskStatus
from mlora_operator.memory.origin import origin_of
from mlora_operator.reconcile.decide import decide
from mlora_operator.reconcile.state.snapshot import Contact, Key, WorkerGroup

TIME = "2026-03-01T11:00:00Z"
NONSENSE = ("soon", "9999-12-31T23:59:59Z")


def texts(schema: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    """The paths of all texts of a status that are not in a list."""
    for name, child in schema.get("properties", {}).items():
        if child["type"] == "string" and "enum" not in child:
            yield (*path, name)
        yield from texts(child, *path, name)


def status_with(path: tuple[str, ...], text: str) -> dict[str, Any]:
    status: dict[str, Any] = {path[-1]: text}
    for name in reversed(path[:-1]):
        status = {name: status}
    return status


TASK_TEXTS = list(texts(structural(TaskStatus, defaults=False)))
PIPELINE_TEXTS = list(texts(structural(PipelineStatus, defaults=False)))


def state_of_another(
    make: Any, *tasks: Any, pipeline: Any = None, group: WorkerGroup | None = None
) -> str | None:
    other = make.task("other")
    contact = Contact(report=make.report(*(make.reported("Prepared", one.key.name) for one in tasks)))
    snapshot = make.snapshot(
        other,
        *tasks,
        pipelines=(pipeline or make.pipeline(scheduling={"policy": "fairShare"}),),
        group=group or make.group(),
        contact=contact if pipeline is None else None,
    )
    state: str | None = decide(snapshot, make.settings(), make.now).task_statuses[other.key].state
    return state


@pytest.mark.parametrize("path", TASK_TEXTS, ids=".".join)
@pytest.mark.parametrize("done", [(), ("Succeeded",)])
def test_of_a_task(make: Any, path: tuple[str, ...], done: tuple[str, ...]) -> None:
    limits = {"startDeadlineSeconds": 60, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 60}
    held = {"conditions": [make.condition(one, "True") for one in done], "pipeline": "team-a/toy", "step": 1}
    times = {"startTime": TIME} | ({"completionTime": TIME} if done == ("Succeeded",) else {})
    for text in NONSENSE:
        task = make.task("t1", status={**held, **times, **status_with(path, text)}, **limits)
        assert state_of_another(make, task) == "Pending", (path, text)


@pytest.mark.parametrize("path", PIPELINE_TEXTS, ids=".".join)
def test_of_a_pipeline(make: Any, path: tuple[str, ...]) -> None:
    for text in NONSENSE:
        status = {"observedGeneration": 1, **status_with(path, text)}
        assert state_of_another(make, pipeline=make.pipeline(status=status), group=make.group(ready=0))


LINE = {"coefficients": ["1e6", "100"], "interval": "0.1"}
FIT = {"samples": 9, "widest": 100, "correction": "1", "kept": LINE, "forward": LINE, "backward": LINE}


@pytest.mark.parametrize("nonsense", ["nan", "inf", "1e308", "-inf"])
@pytest.mark.parametrize(
    "change",
    [
        lambda text: {"correction": text},
        lambda text: {"kept": {**LINE, "interval": text}},
        lambda text: {"forward": {**LINE, "coefficients": ["1", text]}},
        lambda _: {"widest": -1},
    ],
)
def test_of_what_was_learned_of_the_memory(make: Any, change: Any, nonsense: str) -> None:
    """Numbers are text there. What is none that could have been learned is as if nothing had been."""
    pipeline = make.pipeline()
    learned = {**FIT, "stage": 0, "origin": origin_of(pipeline.spec, make.stages()), **change(nonsense)}
    status = {**shape(make), "memory": [learned]}
    assert state_of_another(make, pipeline=make.pipeline(status=status), group=make.group(ready=0))


def shape(make: Any, *stages: int) -> dict[str, Any]:
    told = [one.model_dump(mode="json", by_alias=True) for one in make.stages()]
    numbered = [{**one, "stage": number} for one, number in zip(told, stages or (0, 1), strict=True)]
    facts = make.facts().model_dump(mode="json", by_alias=True)
    return {"observedGeneration": 1, "facts": facts, "stages": numbered}


@pytest.mark.parametrize("stages", [(10**30, 1), (0, 7), (1, 0)])
def test_of_the_stages(make: Any, stages: tuple[int, int]) -> None:
    pipeline = make.pipeline(status=shape(make, *stages))
    assert state_of_another(make, pipeline=pipeline, group=make.group(ready=0))


def test_a_condition_whose_time_is_nonsense_holds_all_the_same(make: Any) -> None:
    """A finished task would train once more."""
    for text in NONSENSE:
        succeeded = make.condition("Succeeded", "True") | {"lastTransitionTime": text}
        waits = make.condition("Admitted", "False") | {"lastTransitionTime": text}
        assert make.task(status={"conditions": [succeeded]}).finished
        assert state_of_another(make, make.task("t1", status={"conditions": [waits]})) == "Pending"


def test_times_of_statuses_are_times_to_the_api_server_too() -> None:
    for model, known in ((TaskStatus, TASK_TEXTS), (PipelineStatus, PIPELINE_TEXTS)):
        for path in known:
            node: Any = {"properties": structural(model, defaults=False)["properties"]}
            for name in path:
                node = node["properties"][name]
            is_time = path[-1].endswith("Time") or path[-1] in (
                "since",
                "again",
                "idleSince",
                "updatingSince",
                "lastRestart",
            )
            assert (node.get("format") == "date-time") is is_time, path


def test_what_a_group_lacks_in_the_words_of_a_newer_operator_is_something_else(make: Any) -> None:
    status = {
        "observedGeneration": 1,
        "start": {"lack": "Newer", "since": TIME, "again": TIME, "attempts": 1},
    }
    pipeline = make.pipeline(status=status)
    snapshot = make.snapshot(make.task(), pipelines=(pipeline,), group=make.group(replicas=0))
    assert decide(snapshot, make.settings(), make.now).workers[Key("team-a", "toy")].replicas == 2
