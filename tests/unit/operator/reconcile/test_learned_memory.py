"""What a pipeline has learned of its memory outlives every change of its spec that says nothing about memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlora_operator.memory.fit import Coefficients, FittedLine, StageFit
from mlora_operator.memory.learned import to_status
from mlora_operator.memory.origin import origin_of
from mlora_operator.reconcile.admission.capacity import memory_model
from mlora_operator.reconcile.admission.pipeline_view import PipelineView, PipelineViews, view
from mlora_operator.reconcile.assignment.fit import FreeMemory, PipelineMemories
from mlora_operator.reconcile.state.snapshot import Contact, Snapshot
from mlora_worker.protocol import MemorySample

FIT = StageFit(
    kept=FittedLine(Coefficients(b1=1234.0), 0.02),
    forward=FittedLine(Coefficients(b1=2345.0), 0.02),
    backward=FittedLine(Coefficients(b1=3456.0), 0.02),
    samples=20,
    widest=512,
    correction=1.5,
)


def changed(
    make: Any,
    spec: dict[str, Any],
    *,
    stages: int = 2,
    images: tuple[str | None, str | None] = (None, None),
    **status: Any,
) -> PipelineView:
    """A pipeline that had learned ``FIT`` of both stages before its spec became what ``spec`` says. ``images``:
    the operator's, then and now."""
    before = make.pipeline()
    assert before.spec is not None
    told = make.stages(count=stages)
    known = to_status({0: FIT, 1: FIT}, origin_of(before.spec, make.stages()), images[0])
    held = {
        "observedGeneration": 1,
        "memory": [one.model_dump(by_alias=True, mode="json") for one in known],
        **status,
    }
    pipeline = make.pipeline(generation=2, status=held, **spec)
    report = make.report(count=stages).model_copy(update={"stages": told})
    contact, now = Contact(report=report), images[1]
    return view(pipeline, (), make.snapshot(contact=contact, group=make.group(), worker_image=now))


@pytest.mark.parametrize(
    ("what", "spec", "kept"),
    [
        ("nothing", {}, True),
        ("the name that tasks call the model by", {"model": {"name": "other"}}, True),
        ("the budget", {"memory": {"budget": "3Gi"}}, True),
        ("the margin", {"memory": {"margin": 0.2}}, True),
        ("the width of microbatches", {"microbatchTokens": 128}, True),
        ("whose turn it is", {"scheduling": {"policy": "fairShare"}}, True),
        ("patience", {"idleTimeout": "1h", "stallTimeout": "1h", "restarts": {"limit": 9}}, True),
        ("who may come", {"allowedNamespaces": {"from": "All"}}, True),
        ("the stores", {"storage": {"region": "r"}, "checkpoints": {"uri": "s3://c/p"}}, True),
        ("threads", {"worker": {"threads": 3}}, True),
        ("nodes and resources", {"worker": {"nodeSelector": {"a": "b"}, "resources": {"limits": {"cpu": 9}}}}, True),
        ("the weights", {"model": {"uri": "s3://models/other"}}, False),
        ("their revision", {"model": {"revision": "v2"}}, False),
        ("their type", {"model": {"dtype": "float32"}}, False),
        ("their quantisation", {"model": {"quantization": {"type": "int8"}}}, False),
        ("no quantisation, said in words", {"model": {"quantization": {"type": "none"}}}, True),
        ("recomputation", {"recomputeActivations": True}, False),
        ("the image", {"worker": {"image": "workers:2"}}, False),
        ("what may choose other kernels", {"worker": {"env": [{"name": "A", "value": "b"}]}}, False),
    ],
)  # fmt: skip
def test_a_change_of_the_spec_forgets_what_was_learned_only_where_that_says_nothing_any_more(
    make: Any, what: str, spec: dict[str, Any], kept: bool
) -> None:
    model = memory_model(changed(make, spec))
    assert model is not None
    assert model.learned == ({0: FIT, 1: FIT} if kept else {}), what


def test_another_number_of_stages_or_another_device_forgets_it(make: Any) -> None:
    three = memory_model(changed(make, {"stages": 3}, stages=3))
    assert three is not None
    assert three.learned == {}
    spec = make.pipeline().spec
    gpus = [stage.model_copy(update={"device": f"cuda:{stage.stage}"}) for stage in make.stages()]
    others = [stage.model_copy(update={"device": "cuda:0"}) for stage in make.stages()]
    assert origin_of(spec, gpus) == origin_of(spec, others) != origin_of(spec, make.stages())


def test_what_workers_of_a_former_spec_measure_is_not_taken_for_what_new_ones_will_need(make: Any) -> None:
    samples = tuple(
        MemorySample(
            stage=0, tokens=tokens, squared_tokens=tokens**2, kept_bytes=tokens, backward_bytes=9 * tokens
        )
        for tokens in (10, 20, 30, 40, 50)
    )
    seen = changed(make, {"recomputeActivations": True})
    report = seen.contact.report
    assert report is not None
    told = replace(seen, contact=Contact(report=report.model_copy(update={"memory": samples})))
    learned = memory_model(told)
    assert learned is not None
    assert learned.learned.keys() == {0}
    known = {"facts": report.facts, "stages": report.stages, "observed_generation": told.pipeline.generation}
    pipeline = replace(told.pipeline, status=told.pipeline.status.model_copy(update=known))
    stale = memory_model(replace(told, pipeline=pipeline, revision="another"))
    assert stale is not None
    assert stale.learned == {}


@pytest.mark.parametrize(
    ("then", "now", "kept"),
    [
        ("workers:1", "workers:1", True),
        ("workers:1", "workers:2", False),
        (None, "workers:2", True),  # written by a version that did not say
    ],
)
def test_another_image_of_the_operators_own_forgets_what_was_learned(
    make: Any, then: str | None, now: str, kept: bool
) -> None:
    model = memory_model(changed(make, {}, images=(then, now)))
    assert model is not None
    assert (model.fit_of(make.stages()[0]).samples == FIT.samples) is kept


def test_the_image_of_a_spec_goes_before_the_operators_own(make: Any) -> None:
    seen = view(make.pipeline(worker={"image": "own:1"}), (), make.snapshot(worker_image="workers:2"))
    assert seen.image == "own:1"


def test_all_who_ask_about_a_pipelines_memory_know_its_image(make: Any) -> None:
    """Else one of them would decide by the bare model what another one knows better."""
    before = make.pipeline()
    assert before.spec is not None
    line = FittedLine(Coefficients(b1=1e5), 0.02)  # much more than the bare model says
    heavy = replace(FIT, kept=line, forward=line, backward=line)
    known = to_status({0: heavy, 1: heavy}, origin_of(before.spec, make.stages()), "workers:1")
    task = make.task("a")

    def snapshot(**spec: Any) -> Snapshot:
        held = {
            "observedGeneration": 1,
            "memory": [one.model_dump(by_alias=True, mode="json") for one in known],
        }
        pipeline = make.pipeline(status=held, **spec)
        contact = Contact(report=make.report())
        return make.snapshot(
            task, pipelines=(pipeline,), contact=contact, group=make.group(), worker_image="workers:1"
        )

    now = snapshot()
    learned = memory_model(view(now.pipelines[0], (task,), now))
    assert learned is not None
    bare = replace(learned, learned={})
    needs = [max(stage.needed for stage in one.by_stage([task.uid])) for one in (bare, learned)]
    assert needs[0] < needs[1]
    tight = snapshot(memory={"budget": str(needs[1] - 1), "margin": 0})
    memories = PipelineMemories((task,), PipelineViews(tight))
    assert not memories.suits(task, tight.pipelines[0])
    assert not FreeMemory((), memories).has_room(tight.pipelines[0], task)
