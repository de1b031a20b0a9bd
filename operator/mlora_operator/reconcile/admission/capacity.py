"""The memory of a pipeline: what its stages have, and what its tasks ask for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlora_operator.api.units import parse_bytes
from mlora_operator.memory.fit import StageFit
from mlora_operator.memory.learned import learn
from mlora_operator.memory.model import Demand, MemoryModel
from mlora_operator.memory.origin import origin_of
from mlora_operator.memory.scheduler_memory import SchedulerMemory, scheduler_memory
from mlora_operator.reconcile.admission.model_requests import of_model
from mlora_operator.reconcile.admission.pipeline_view import PipelineView
from mlora_operator.reconcile.memoize import Memoized
from mlora_worker.protocol import ModelFacts, StageReport

Shape = tuple[ModelFacts, tuple[StageReport, ...]]


def memory_model(view: PipelineView) -> MemoryModel | None:
    """The memory of the pipeline with what its tasks ask for, but for the unjudged; None while the model's shape is not
    known."""
    if view.pipeline.spec is None or view.shape is None:
        return None
    known = of_model(view.shape[0])
    demands = {
        task.uid: known.of(task.spec).demand
        for task in view.tasks
        if task.spec is not None and task.uid not in view.unjudged
    }
    return _memory(view, view.shape, demands)


def known_memory(
    view: PipelineView, shape: Shape, demands: Mapping[str, Demand], known: Memoized[SchedulerMemory]
) -> SchedulerMemory:
    """Of ``_memory``; the same one as long as all is the same that it is made of."""
    report, pipeline = view.present_report, view.pipeline
    told = (report.memory, report.exhausted, report.held) if report is not None else ((), (), None)
    # Mostly the same objects, which are not looked into.
    made_of = (pipeline.spec, pipeline.status.memory, view.image, *shape, *told, demands)
    memory = known.known(pipeline.uid, made_of)
    if memory is None:
        memory = known.keep(pipeline.uid, made_of, fresh_memory(view, shape, demands))
    return memory


def fresh_memory(view: PipelineView, shape: Shape, demands: Mapping[str, Demand]) -> SchedulerMemory:
    """Of ``_memory``, beside what tasks hold that do not train there."""
    report = view.present_report
    lingering = report.held if report is not None else None
    return scheduler_memory(_memory(view, shape, demands), lingering or ())


def _memory(view: PipelineView, shape: Shape, demands: Mapping[str, Demand]) -> MemoryModel:
    spec = view.pipeline.spec
    assert spec is not None
    facts, stages = shape
    model = MemoryModel(
        facts=facts,
        stages=stages,
        microbatch_tokens=spec.microbatch_tokens,
        budget=parse_bytes(spec.memory.budget) if spec.memory.budget else None,
        margin=spec.memory.margin,
        demands=demands,
        recompute=spec.recompute_activations,
    )
    return replace(model, learned=_learned(view, model))


def _learned(view: PipelineView, model: MemoryModel) -> Mapping[int, StageFit]:
    """From the status, as far as that was learned of the same, and from what the workers say now, unless they still have a
    former spec."""
    assert view.pipeline.spec is not None
    origin = origin_of(view.pipeline.spec, model.stages)
    images = (None, view.image)  # None: of a version that did not write it down
    held = [one for one in view.pipeline.status.memory if one.origin == origin and one.image in images]
    report = view.present_report
    return learn(
        model,
        held,
        report.memory if report is not None else (),
        report.exhausted if report is not None else (),
    )
