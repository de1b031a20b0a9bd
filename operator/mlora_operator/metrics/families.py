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
class MetricFamily:
    """``name`` as Prometheus stores it, but for the endings of a histogram's parts."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


BUILD_INFO = MetricFamily(
    "mlora_operator_build_info", "gauge", "1, with the version of the operator", labels=("version",)
)
LEADER = MetricFamily("mlora_operator_leader", "gauge", "1 while this replica holds the Lease, else 0")
WATCHING = MetricFamily(
    "mlora_operator_watching",
    "gauge",
    "1 once the caches have synced; until then no replica leads",
)
LAST_PASS = MetricFamily(
    "mlora_operator_last_pass_timestamp_seconds",
    "gauge",
    "Time of the last successful pass of the reconcile loop",
)
FAILED_PASSES = MetricFamily(
    "mlora_operator_failed_passes", "gauge", "Consecutive failed passes; 0 after a success"
)
UNDECIDED = MetricFamily(
    "mlora_operator_undecided_objects",
    "gauge",
    "Tasks and pipelines that the last pass could not reconcile; they stay unchanged",
    labels=("kind",),
)
PASS = MetricFamily(
    "mlora_operator_pass_duration_seconds",
    "histogram",
    "Duration of a reconcile pass: observe, decide, start to act",
    buckets=SECONDS_OF_A_PASS,
)
DECISION = MetricFamily(
    "mlora_operator_decision_duration_seconds",
    "histogram",
    "Duration of the decision in a pass: order, memory, admission, statuses",
    buckets=SECONDS_OF_A_PASS,
)
ERRORS = MetricFamily(
    "mlora_operator_reconcile_errors_total",
    "counter",
    "Failed passes and failed writes; both are retried",
    labels=("stage",),
)
API_REQUESTS = MetricFamily(
    "mlora_operator_api_requests_total",
    "counter",
    "Requests to the API server, except watches; code is the HTTP status, or none without an answer",
    labels=("method", "resource", "code"),
)
API_DURATION = MetricFamily(
    "mlora_operator_api_request_duration_seconds",
    "histogram",
    "Seconds until the API server answered",
    labels=("method",),
    buckets=SECONDS_OF_A_PASS,
)
TASKS = MetricFamily("mlora_tasks", "gauge", "Tasks by state", labels=(*PIPELINE, "state"))
WAITING = MetricFamily(
    "mlora_tasks_waiting", "gauge", "Tasks that wait for admission: the queue", labels=(*PIPELINE, "priority")
)
LONGEST_WAIT = MetricFamily(
    "mlora_tasks_longest_wait_seconds",
    "gauge",
    "Waiting time of the oldest of them since its creation or last retry",
    labels=(*PIPELINE, "priority"),
)
ADMITTED = MetricFamily(
    "mlora_tasks_admitted_total",
    "counter",
    "Admissions; a task that was preempted or restarted is admitted again",
    labels=(*PIPELINE, "priority"),
)
PREEMPTED = MetricFamily("mlora_tasks_preempted_total", "counter", "Preemptions", labels=PIPELINE)
RESTARTED = MetricFamily(
    "mlora_tasks_restarted_total",
    "counter",
    "Tasks that restarted, from a checkpoint if one existed, because their workers ended",
    labels=PIPELINE,
)
FINISHED = MetricFamily(
    "mlora_tasks_finished_total",
    "counter",
    "Tasks that succeeded or failed, with the condition's reason",
    labels=(*PIPELINE, "result", "reason"),
)
WAIT = MetricFamily(
    "mlora_task_wait_seconds",
    "histogram",
    "Time from a task's creation to its first admission",
    labels=("priority",),
    buckets=SECONDS_OF_A_TASK,
)
DURATION = MetricFamily(
    "mlora_task_duration_seconds",
    "histogram",
    "Time from a task's first admission to its end",
    labels=("result",),
    buckets=SECONDS_OF_A_TASK,
)
PIPELINE_STATE = MetricFamily(
    "mlora_pipeline_state",
    "gauge",
    "1 for the pipeline's state, 0 for the others",
    labels=(*PIPELINE, "state"),
)
WORKERS_WANTED = MetricFamily(
    "mlora_pipeline_workers_wanted", "gauge", "Desired number of worker pods", labels=PIPELINE
)
WORKERS_READY = MetricFamily(
    "mlora_pipeline_workers_ready", "gauge", "Worker pods that are ready", labels=PIPELINE
)
REACHABLE = MetricFamily(
    "mlora_pipeline_coordinator_reachable",
    "gauge",
    "1 while the coordinator responds; 0 while it does not, or while its stages load the model; absent without "
    "workers",
    labels=PIPELINE,
)
CERTIFICATE_END = MetricFamily(
    "mlora_pipeline_certificate_end_timestamp_seconds",
    "gauge",
    "When the certificate ends by which the coordinator proves itself; absent without workers or TLS",
    labels=PIPELINE,
)
ACTIVE = MetricFamily(
    "mlora_pipeline_active_tasks", "gauge", "Tasks that are training or saving", labels=PIPELINE
)
STALLS = MetricFamily("mlora_pipeline_stalls_total", "counter", "How often training stalled", labels=PIPELINE)
PIPELINE_RESTARTS = MetricFamily(
    "mlora_pipeline_restarts_total",
    "counter",
    "Failures of the workers; each one restarted all of them",
    labels=PIPELINE,
)
TOKENS = MetricFamily(
    "mlora_pipeline_tokens_total",
    "counter",
    "Tokens trained by the current workers; resets when they restart",
    labels=PIPELINE,
)
MICROBATCHES = MetricFamily(
    "mlora_pipeline_microbatches_total", "counter", "Microbatches, likewise", labels=PIPELINE
)
BUDGET = MetricFamily(
    "mlora_pipeline_memory_budget_bytes",
    "gauge",
    "Usable memory of a stage",
    labels=(*PIPELINE, "stage"),
)
PREDICTED = MetricFamily(
    "mlora_pipeline_memory_predicted_bytes",
    "gauge",
    "Predicted peak memory of the tasks in training, including the base model",
    labels=(*PIPELINE, "stage"),
)
USED = MetricFamily(
    "mlora_pipeline_memory_used_bytes",
    "gauge",
    "Measured peak memory of the stage's last microbatches, including base model and adapters",
    labels=(*PIPELINE, "stage"),
)
TASK_STEP = MetricFamily("mlora_task_step", "gauge", "Completed optimizer steps", labels=TASK)
TASK_STEPS = MetricFamily("mlora_task_steps", "gauge", "Total optimizer steps", labels=TASK)
TASK_LOSS = MetricFamily("mlora_task_loss", "gauge", "Mean loss of the last step", labels=TASK)
TASK_EVALUATION_LOSS = MetricFamily(
    "mlora_task_evaluation_loss", "gauge", "Mean loss of the last evaluation", labels=TASK
)
TASK_REWARD_MARGIN = MetricFamily(
    "mlora_task_reward_margin",
    "gauge",
    "Mean margin of the chosen over the rejected answers' reward in the last step",
    labels=TASK,
)
TASK_REWARD_ACCURACY = MetricFamily(
    "mlora_task_reward_accuracy",
    "gauge",
    "Part of the last step's pairs whose chosen answer has the higher reward",
    labels=TASK,
)
TASK_CHOSEN_LOGPS = MetricFamily(
    "mlora_task_chosen_logps", "gauge", "Mean log-probability of the last step's chosen answers", labels=TASK
)
TASK_REJECTED_LOGPS = MetricFamily(
    "mlora_task_rejected_logps",
    "gauge",
    "Mean log-probability of the last step's rejected answers",
    labels=TASK,
)
TASK_KL = MetricFamily(
    "mlora_task_kl",
    "gauge",
    "Of kto, the last step's estimate of the divergence from the reference",
    labels=TASK,
)
TASK_SPEED = MetricFamily(
    "mlora_task_tokens_per_second", "gauge", "Tokens per second of training", labels=TASK
)
TASKS_LEFT_OUT = MetricFamily(
    "mlora_task_series_left_out", "gauge", "Tasks in training beyond metrics.mostTasks; they have no series"
)

FAMILIES = (
    BUILD_INFO, LEADER, WATCHING, LAST_PASS, FAILED_PASSES, UNDECIDED, PASS, DECISION, ERRORS, API_REQUESTS,
    API_DURATION, TASKS, WAITING,
    LONGEST_WAIT, ADMITTED, PREEMPTED, RESTARTED, FINISHED, WAIT, DURATION, PIPELINE_STATE, WORKERS_WANTED,
    WORKERS_READY, REACHABLE, CERTIFICATE_END,
    ACTIVE, STALLS, PIPELINE_RESTARTS, TOKENS, MICROBATCHES, BUDGET, PREDICTED, USED,
    TASK_STEP, TASK_STEPS, TASK_LOSS, TASK_EVALUATION_LOSS, TASK_REWARD_MARGIN, TASK_REWARD_ACCURACY,
    TASK_CHOSEN_LOGPS, TASK_REJECTED_LOGPS, TASK_KL, TASK_SPEED, TASKS_LEFT_OUT,
)  # fmt: skip
