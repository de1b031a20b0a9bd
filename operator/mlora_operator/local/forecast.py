"""What would become of tasks on one pipeline: who is let in, how they travel, what it takes. Pure.

The operator's own memory model and admission say who gets a place, and the coordinator's own planner says how those
travel. So what is shown is what would be done, as far as the inputs are what they will be; ``assumed`` says where they are
not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from mlora_operator.api.pipeline import LoRAPipelineSpec, Scheduling
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.local.fits import LearnedPipeline
from mlora_operator.memory.model import Demand, MemoryModel, adapter_bytes, demand_of
from mlora_operator.reconcile.admission.workload import candidate
from mlora_operator.reconcile.state.cause import Cause
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.scheduling.admission import Admission, AdmissionOutcome, MemoryCheck
from mlora_operator.scheduling.entrant import Entrant, EntrantProgress, EntrantState
from mlora_operator.scheduling.fair_share import FairShare
from mlora_operator.scheduling.memory import WholeSetMemory
from mlora_operator.scheduling.policy import Policy
from mlora_operator.scheduling.priority import Priority
from mlora_operator.scheduling.schedule import schedule
from mlora_operator.scheduling.shortest_remaining import ShortestRemaining
from mlora_operator.scheduling.words import not_yet, too_large
from mlora_worker.protocol import (
    ModelFacts,
    RowSummary,
    StageReport,
    StageShape,
    SurveyAnswer,
    TaskAnswer,
)
from mlora_worker.stream.costs import launch_tokens, one_device, stage_costs, turn_tokens
from mlora_worker.stream.libraries import KERNEL_BYTES, may_choose
from mlora_worker.stream.planner import StreamPlan, TaskLoad, plan_stream, rows_per_step

UNKNOWN_MEMORY = 2**62  # bytes; more than any task asks for
_LEAST_MICROBATCH = 16  # the least that a LoRAPipeline may say


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Of each stage's device. ``bytes`` None: not known, and nobody is judged by it."""

    bytes: tuple[int, ...] | None
    source: str


@dataclass(frozen=True, slots=True)
class StageForecast:
    shape: StageShape
    weights: int  # bytes, with kernels of another library where a worker may choose it
    share: float  # of the cost of a token
    embedding: bool
    head: bool
    memory: MemoryCheck  # with all admitted tasks in training


@dataclass(frozen=True, slots=True)
class TaskForecast:
    task: Task
    state: str  # Admitted, or in the words of its future conditions
    cause: Cause
    load: TaskLoad
    longest: int  # tokens of the longest row
    rows: RowSummary | None
    total_steps: int | None
    adapter_bytes: int  # of all stages, with gradients and optimizer

    @property
    def admitted(self) -> bool:
        return self.state == AdmissionOutcome.ADMITTED


@dataclass(frozen=True, slots=True)
class PipelineForecast:
    name: str
    spec: LoRAPipelineSpec
    device: str
    memory: DeviceMemory
    stages: tuple[StageForecast, ...]
    tasks: tuple[TaskForecast, ...]
    plan: StreamPlan  # of the admitted tasks, by uid
    speedup: float  # over one device; 0 when nobody is admitted
    tokens_per_second: float | None
    assumed: tuple[str, ...]


def forecast(
    name: str,
    spec: LoRAPipelineSpec,
    tasks: Sequence[Task],
    answer: SurveyAnswer,
    *,
    device: str,
    memory: DeviceMemory,
    tokens_per_second: float | None = None,
    known: LearnedPipeline | None = None,
) -> PipelineForecast:
    """``tasks`` in the scheduler's order; ``answer`` is about this pipeline and has facts. ``tokens_per_second``: of
    one device with the whole model. ``known``: what was learned of the same pipeline's memory before.
    """
    facts = answer.facts
    assert facts is not None
    answers = {one.uid: one for one in answer.tasks}
    known = known if known is not None else LearnedPipeline()
    model = _memory_model(spec, tasks, facts, answer.stages, memory, device, known)
    loads = {task.uid: _load(task, answers.get(task.uid), facts) for task in tasks}
    admissions = _admissions(tasks, answers, loads, model, spec.scheduling)
    admitted = [
        task.uid
        for task in tasks
        if task.uid in admissions and admissions[task.uid].outcome is AdmissionOutcome.ADMITTED
    ]
    costs = stage_costs(facts, spec.stages, launch_tokens(device), turn_tokens(device))
    travelling = {uid: loads[uid] for uid in admitted}
    plan = plan_stream(travelling, costs, spec.microbatch_tokens)
    alone = plan_stream(travelling, (one_device(costs),), spec.microbatch_tokens)
    speedup = alone.round_cost / plan.round_cost if admitted else 0.0
    whole = sum(cost.per_token for cost in costs)
    return PipelineForecast(
        name=name,
        spec=spec,
        device=device,
        memory=memory,
        stages=tuple(
            StageForecast(
                shape,
                _weights(shape, answer.stages, device, memory),
                cost.per_token / whole,
                shape.stage == 0,
                shape is answer.stages[-1],
                check,
            )
            for shape, cost, check in zip(answer.stages, costs, model.by_stage(admitted), strict=True)
        ),
        tasks=tuple(
            _task(task, admissions.get(task.uid), loads[task.uid], answers.get(task.uid), facts, model)
            for task in tasks
        ),
        plan=plan,
        speedup=speedup,
        tokens_per_second=tokens_per_second * speedup if tokens_per_second and admitted else None,
        assumed=tuple(_assumed(tasks, answers, facts, answer.stages, device, memory, known)),
    )


def _memory_model(
    spec: LoRAPipelineSpec,
    tasks: Sequence[Task],
    facts: ModelFacts,
    shapes: Sequence[StageShape],
    memory: DeviceMemory,
    device: str,
    known: LearnedPipeline,
) -> MemoryModel:
    groups = {stage.stage: stage.input_groups for stage in known.stages}
    return MemoryModel(
        facts=facts,
        stages=tuple(
            StageReport(
                stage=shape.stage,
                first_layer=shape.first_layer,
                last_layer=shape.last_layer,
                device=device,
                resident_bytes=_weights(shape, shapes, device, memory),
                capacity_bytes=memory.bytes[shape.stage] if memory.bytes is not None else UNKNOWN_MEMORY,
                input_groups=groups.get(shape.stage, ()),
                quantized=shape.quantized,
            )
            for shape in shapes
        ),
        microbatch_tokens=spec.microbatch_tokens,
        budget=None,
        margin=spec.memory.margin,
        demands={task.uid: _demand(task.spec, facts) for task in tasks if task.spec is not None},
        recompute=spec.recompute_activations,
        learned=known.fits,
    )


def _demand(spec: LoRATaskSpec, facts: ModelFacts) -> Demand:
    return demand_of(spec.lora, spec.training.for_model(facts.max_positions), facts.max_positions)


def _longest(spec: LoRATaskSpec, facts: ModelFacts) -> int:
    """Tokens that a row of the task may have, whatever its rows are."""
    return _demand(spec, facts).longest_row


def _weights(shape: StageShape, shapes: Sequence[StageShape], device: str, memory: DeviceMemory) -> int:
    """Bytes, with kernels of another library where a worker may choose it, which depends on its processor, too."""
    budget = memory.bytes[shape.stage] if memory.bytes is not None else None
    parameters = sum(
        one.parameters for one in shapes
    )  # of a tied head twice, if it is cut; the worker's is exact
    chooses = shape.products is None and device == "cpu" and may_choose(parameters, budget)
    return shape.resident_bytes + (KERNEL_BYTES if chooses else 0)


def _admissions(
    tasks: Sequence[Task],
    answers: Mapping[str, TaskAnswer],
    loads: Mapping[str, TaskLoad],
    model: MemoryModel,
    scheduling: Scheduling,
) -> Mapping[str, Admission]:
    """As the operator will decide once all tasks are prepared and none has trained. A suspended task has none."""
    failed = {uid: one.failure for uid, one in answers.items() if one.failure is not None}
    now = max((task.created for task in tasks), default=datetime.min.replace(tzinfo=UTC))
    entrants = [
        Entrant(
            candidate(task),
            EntrantState.WAITING,
            since=now,
            progress=EntrantProgress(0, _total_steps(task, answers.get(task.uid)), loads[task.uid].tokens),
        )
        for task in tasks
        if task.spec is not None and not task.spec.suspend and task.uid not in failed
    ]
    policies: Mapping[str, Policy] = {
        "priority": Priority(),
        "shortestRemaining": ShortestRemaining(),
        "fairShare": FairShare(weights=scheduling.weights),
    }
    refused = {uid: Admission(AdmissionOutcome.REFUSED, failure=failure) for uid, failure in failed.items()}
    return {**schedule(entrants, WholeSetMemory(model.check), policies[scheduling.policy], now), **refused}


def _total_steps(task: Task, answer: TaskAnswer | None) -> int | None:
    """None: its rows were not all read."""
    assert task.spec is not None
    training = task.spec.training
    rows = answer.rows if answer is not None else None
    if training.max_steps is None and rows is not None and rows.whole:
        return training.epochs * -(-rows.counts.used // rows_per_step(training))
    return training.max_steps


def _load(task: Task, answer: TaskAnswer | None, facts: ModelFacts) -> TaskLoad:
    """Of a usual step: from the rows that were read, else with every row as long as it may be."""
    assert task.spec is not None
    rows = rows_per_step(task.spec.training)
    if answer is None or answer.rows is None:
        return TaskLoad(rows * _longest(task.spec, facts), rows)
    summary = answer.rows
    if summary.whole:
        rows = min(rows, summary.counts.used)
    return TaskLoad(max(1, round(rows * summary.mean)), rows, summary.deviation / summary.mean)


def _task(
    task: Task,
    admission: Admission | None,
    load: TaskLoad,
    answer: TaskAnswer | None,
    facts: ModelFacts,
    model: MemoryModel,
) -> TaskForecast:
    assert task.spec is not None
    rows = answer.rows if answer is not None else None
    state, cause = _words(task, admission, model)
    longest = rows.longest if rows is not None else _longest(task.spec, facts)
    steps = _total_steps(task, answer)
    moments = _demand(task.spec, facts).moments
    held = sum(adapter_bytes(task.spec.lora, facts, stage.stage, moments) for stage in model.stages)
    return TaskForecast(task, state, cause, load, longest, rows, steps, held)


def _words(task: Task, admission: Admission | None, model: MemoryModel) -> tuple[str, Cause]:
    """State and cause, as the task's status will have them."""
    if admission is None:
        return "Suspended", Cause("Suspended", "spec.suspend is true")
    match admission.outcome:
        case AdmissionOutcome.ADMITTED:
            return AdmissionOutcome.ADMITTED, Cause("Admitted", "is admitted at once")
        case AdmissionOutcome.REFUSED:
            assert admission.failure is not None
            return "Failed", Cause(admission.failure.reason.value, admission.failure.message)
        case AdmissionOutcome.NEVER_FITS:
            return "Rejected", Cause("ExceedsCapacity", too_large(admission) + _what_fits(task.uid, model))
        case _:
            return "Queued", Cause("WaitingForMemory", not_yet(admission, task.key.namespace))


def _what_fits(uid: str, model: MemoryModel) -> str:
    """The largest microbatchTokens (halved again and again) with which the task would fit, or recomputation."""
    tokens = model.microbatch_tokens // 2
    while tokens >= _LEAST_MICROBATCH:
        if replace(model, microbatch_tokens=tokens).check([uid]).fits:
            return f"; it would fit alone with microbatchTokens: {tokens}"
        tokens //= 2
    if replace(model, recompute=True).check([uid]).fits:
        return "; it would fit alone with recomputeActivations: true"
    return ""


def _assumed(
    tasks: Sequence[Task],
    answers: Mapping[str, TaskAnswer],
    facts: ModelFacts,
    shapes: Sequence[StageShape],
    device: str,
    memory: DeviceMemory,
    known: LearnedPipeline,
) -> Iterator[str]:
    for task in tasks:
        assert task.spec is not None
        answer = answers.get(task.uid)
        if answer is None or (answer.rows is None and answer.failure is None):
            longest = _longest(task.spec, facts)
            why = f" ({answer.unread})" if answer is not None and answer.unread else ""
            yield f"{task.key.name}: its rows were not read{why}; each is assumed to have {longest} tokens"
        elif answer.rows is not None and not answer.rows.whole:
            yield f"{task.key.name}: the other rows are assumed to be like the first {answer.rows.counts.rows}"
    if any(
        one.products is None and _weights(one, shapes, device, memory) > one.resident_bytes for one in shapes
    ):
        yield (
            "weights: with 192 MiB for kernels of oneDNN, which is faster on some processors; a worker chooses when it "
            "starts, and its report says what it took"
        )
    if memory.bytes is None:
        yield f"the memory is not known ({memory.source}): every task is assumed to fit; set --memory"
    else:
        how = "an estimate from the model's shape, which is several times too high"
        if known.fits:
            measured = min(fit.samples for fit in known.fits.values())
            how = f"learned from {measured} microbatches that an earlier run measured on each stage"
        yield (
            f"memory: {memory.source}; what is needed: {how}; every row as long as it may be, as the operator's "
            "admission has it"
        )
    yield (
        "cost: multiply-adds of the frozen linear modules; the head computes for half of the tokens; a "
        f"microbatch costs as much as {launch_tokens(device)} tokens beside its own ({device})"
    )
    yield "throughput: against the whole model on one device as fast as a stage's; messages are hidden behind computing"
