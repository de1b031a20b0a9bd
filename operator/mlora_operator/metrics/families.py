"""Everything that the operator exports, in one table. docs/operators/metrics.md has the same one, and a test compares them.

Labels have few values whatever users do: a pipeline is the platform team's, priorities are put into steps, and states,
reasons, methods and resources are lists in code. A task's or a user namespace's name is a label only where the settings ask
for it, and then of a bounded number of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PIPELINE = ("pipeline_namespace", "pipeline")
TASK = (*PIPELINE, "task_namespace", "task")

SECONDS_OF_A_PASS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SECONDS_OF_A_TASK = (
    1.0,
    5.0,
    15.0,
    60.0,
    300.0,
    900.0,
    3600.0,
    14400.0,
    43200.0,
    86400.0,
    259200.0,
    604800.0,
)


@dataclass(frozen=True, slots=True)
class Family:
    """``name`` as Prometheus stores it, but for the endings of a histogram's parts."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


BUILD_INFO = Family(
    "mlora_operator_build_info", "gauge", "1, with the version of the operator", labels=("version",)
)
LEADER = Family("mlora_operator_leader", "gauge", "1 while this replica holds the Lease, else 0")
WATCHING = Family(
    "mlora_operator_watching",
    "gauge",
    "1 once all that was there at the start has come through the watches; before that nobody leads",
)
LAST_PASS = Family(
    "mlora_operator_last_pass_timestamp_seconds", "gauge", "When a pass of the reconcile loop last decided"
)
FAILED_PASSES = Family(
    "mlora_operator_failed_passes", "gauge", "Passes that have failed in a row by now; 0 once one succeeds"
)
UNDECIDED = Family(
    "mlora_operator_undecided_objects",
    "gauge",
    "Tasks and pipelines about which nothing could be decided in the last pass, so that they stay as they are",
    labels=("kind",),
)
PASS = Family(
    "mlora_operator_pass_duration_seconds",
    "histogram",
    "A pass of the reconcile loop: observe, decide, and begin to act",
    buckets=SECONDS_OF_A_PASS,
)
DECISION = Family(
    "mlora_operator_decision_duration_seconds",
    "histogram",
    "The decision of a pass: order, memory, admission, statuses",
    buckets=SECONDS_OF_A_PASS,
)
ERRORS = Family(
    "mlora_operator_reconcile_errors_total",
    "counter",
    "Passes that ended with an error, and writes that were not done; both are tried again",
    labels=("stage",),
)
API_REQUESTS = Family(
    "mlora_operator_api_requests_total",
    "counter",
    "Requests to the API server but for watches; code is HTTP's, or none without an answer",
    labels=("method", "resource", "code"),
)
API_DURATION = Family(
    "mlora_operator_api_request_duration_seconds",
    "histogram",
    "Seconds until the API server had answered",
    labels=("method",),
    buckets=SECONDS_OF_A_PASS,
)
TASKS = Family("mlora_tasks", "gauge", "Tasks by state", labels=(*PIPELINE, "state"))
WAITING = Family(
    "mlora_tasks_waiting", "gauge", "Tasks that wait for a place: the queue", labels=(*PIPELINE, "priority")
)
LONGEST_WAIT = Family(
    "mlora_tasks_longest_wait_seconds",
    "gauge",
    "For how long the oldest of them has waited since it was made or tried again",
    labels=(*PIPELINE, "priority"),
)
ADMITTED = Family(
    "mlora_tasks_admitted_total",
    "counter",
    "Places given; a task that was preempted or restarted gets another one",
    labels=(*PIPELINE, "priority"),
)
PREEMPTED = Family(
    "mlora_tasks_preempted_total", "counter", "Places taken by tasks that go first", labels=PIPELINE
)
RESTARTED = Family(
    "mlora_tasks_restarted_total",
    "counter",
    "Tasks that began again, from a checkpoint if there was one, since their workers ended",
    labels=PIPELINE,
)
FINISHED = Family(
    "mlora_tasks_finished_total",
    "counter",
    "Tasks that succeeded or failed, with the condition's reason",
    labels=(*PIPELINE, "result", "reason"),
)
WAIT = Family(
    "mlora_task_wait_seconds",
    "histogram",
    "From a task's making to its first place",
    labels=("priority",),
    buckets=SECONDS_OF_A_TASK,
)
DURATION = Family(
    "mlora_task_duration_seconds",
    "histogram",
    "From a task's first place to its end",
    labels=("result",),
    buckets=SECONDS_OF_A_TASK,
)
PIPELINE_STATE = Family(
    "mlora_pipeline_state",
    "gauge",
    "1 for the pipeline's state, 0 for the others",
    labels=(*PIPELINE, "state"),
)
WORKERS_WANTED = Family(
    "mlora_pipeline_workers_wanted", "gauge", "Worker pods that the pipeline shall have now", labels=PIPELINE
)
WORKERS_READY = Family("mlora_pipeline_workers_ready", "gauge", "Worker pods that are ready", labels=PIPELINE)
REACHABLE = Family(
    "mlora_pipeline_coordinator_reachable",
    "gauge",
    "1 while the coordinator answers, 0 while it does not or its stages load the model; absent without workers",
    labels=PIPELINE,
)
CERTIFICATE_END = Family(
    "mlora_pipeline_certificate_end_timestamp_seconds",
    "gauge",
    "When the certificate ends by which the coordinator proves itself; absent without workers or TLS",
    labels=PIPELINE,
)
ACTIVE = Family("mlora_pipeline_active_tasks", "gauge", "Tasks that train or save now", labels=PIPELINE)
STALLS = Family(
    "mlora_pipeline_stalls_total", "counter", "Times that tasks trained but nothing moved", labels=PIPELINE
)
PIPELINE_RESTARTS = Family(
    "mlora_pipeline_restarts_total",
    "counter",
    "Failures of the workers, each of which restarted all",
    labels=PIPELINE,
)
TOKENS = Family(
    "mlora_pipeline_tokens_total",
    "counter",
    "Tokens trained by the present workers; it begins anew with them",
    labels=PIPELINE,
)
MICROBATCHES = Family(
    "mlora_pipeline_microbatches_total", "counter", "Microbatches, likewise", labels=PIPELINE
)
BUDGET = Family(
    "mlora_pipeline_memory_budget_bytes",
    "gauge",
    "Memory of a stage that may be used",
    labels=(*PIPELINE, "stage"),
)
PREDICTED = Family(
    "mlora_pipeline_memory_predicted_bytes",
    "gauge",
    "The most that the tasks in training are predicted to take, base model included",
    labels=(*PIPELINE, "stage"),
)
USED = Family(
    "mlora_pipeline_memory_used_bytes",
    "gauge",
    "The most that the stage's last measured microbatches took, base model and adapters included",
    labels=(*PIPELINE, "stage"),
)
TASK_STEP = Family("mlora_task_step", "gauge", "Optimizer steps done", labels=TASK)
TASK_STEPS = Family("mlora_task_steps", "gauge", "Optimizer steps to do", labels=TASK)
TASK_LOSS = Family("mlora_task_loss", "gauge", "Mean loss of the last step", labels=TASK)
TASK_EVALUATION_LOSS = Family(
    "mlora_task_evaluation_loss", "gauge", "Mean loss of the last evaluation", labels=TASK
)
TASK_SPEED = Family(
    "mlora_task_tokens_per_second", "gauge", "Tokens of the task for each second of its training", labels=TASK
)
TASKS_LEFT_OUT = Family(
    "mlora_task_series_left_out", "gauge", "Tasks in training beyond metrics.mostTasks, which have no series"
)

FAMILIES = (
    BUILD_INFO, LEADER, WATCHING, LAST_PASS, FAILED_PASSES, UNDECIDED, PASS, DECISION, ERRORS, API_REQUESTS,
    API_DURATION, TASKS, WAITING,
    LONGEST_WAIT, ADMITTED, PREEMPTED, RESTARTED, FINISHED, WAIT, DURATION, PIPELINE_STATE, WORKERS_WANTED,
    WORKERS_READY, REACHABLE, CERTIFICATE_END,
    ACTIVE, STALLS, PIPELINE_RESTARTS, TOKENS, MICROBATCHES, BUDGET, PREDICTED, USED,
    TASK_STEP, TASK_STEPS, TASK_LOSS, TASK_EVALUATION_LOSS, TASK_SPEED, TASKS_LEFT_OUT,
)  # fmt: skip
