"""Condition types and reasons: each constant with its sentence. docs/users/conditions.md lists the same."""

from __future__ import annotations

# Types of a LoRATask.
ACCEPTED = "Accepted"  # the spec is valid and a pipeline serves the base model
ADMITTED = "Admitted"  # memory of the pipeline is reserved for the task
RUNNING = "Running"  # the task is training
PREEMPTED = "Preempted"  # a task that comes first in the queue took its memory; it resumes automatically
UPLOAD_BLOCKED = "UploadBlocked"  # the store rejects the adapter or a checkpoint; the upload is retried
SUCCEEDED = "Succeeded"  # the adapter is verified and uploaded
FAILED = "Failed"  # it ended without an adapter; reason and message say why
FINISHED = "Finished"  # it ended, with or without an adapter: one condition to wait for. Absent until then

# Types of a LoRAPipeline.
READY = "Ready"  # all stages have loaded the model and the coordinator responds
WORKERS_AVAILABLE = "WorkersAvailable"  # all worker pods of the current group run
SERVES_OTHERS = "ServesOthers"  # it serves tasks of other namespaces, as its allowedNamespaces says
STALLED = "Stalled"  # tasks are training but make no progress; the group is restarted
PLAN_REJECTED = "PlanRejected"  # its workers do not understand what the operator sends; absent until then
CERTIFICATE_ENDS = "CertificateEnds"  # of its coordinator, within 30 days

# Reasons of Accepted.
REASON_ACCEPTED = "Accepted"
REASON_INVALID_SPEC = "InvalidSpec"  # a field has an error that the schema cannot express
REASON_NO_PIPELINE = "NoPipelineForModel"  # no pipeline serves the base model and none may be created for it
REASON_NAMESPACE_NOT_ALLOWED = "NamespaceNotAllowed"  # the pipeline does not serve this namespace
REASON_SECRET_NOT_FOUND = "SecretNotFound"  # the Secret of storage.secretRef does not exist (yet)
REASON_CONFIG_MAP_NOT_FOUND = "ConfigMapNotFound"  # the ConfigMap, or its key, does not exist (yet)
REASON_SECRET_INCOMPLETE = "SecretIncomplete"  # it lacks a usable value for one of the two AWS keys
REASON_READ_ERROR = "ReadError"  # the API server does not return a Secret, a ConfigMap or labels
REASON_OUTPUT_IN_USE = "OutputInUse"  # another task of the namespace, a pipeline or the task's rows use it
REASON_OUTPUT_IN_USE_BY_OTHER_NAMESPACE = "OutputInUseByOtherNamespace"
REASON_OUTPUT_NOT_ALLOWED = "OutputNotAllowed"  # that prefix is reserved for other namespaces
REASON_PRIORITY_NOT_ALLOWED = "PriorityNotAllowed"  # above what its namespace may have there
REASON_ENDPOINT_NOT_ALLOWED = "EndpointNotAllowed"  # an address that only the worker or its machine can reach
REASON_NAMESPACE_LIMIT_REACHED = "NamespaceLimitReached"  # the pipeline's limit of tasks per namespace
REASON_CREATING_PIPELINE = "CreatingPipeline"  # the operator creates the pipeline from the catalogue

# Reason of Accepted of a task, and of Ready of a pipeline.
REASON_RECONCILE_ERROR = "ReconcileError"  # reconciling this one object fails; it stays as it is

# Reasons of Admitted and Running.
REASON_ADMITTED = "Admitted"
REASON_WAITING_FOR_MEMORY = "WaitingForMemory"  # tasks that come first fill the memory
REASON_PLAN_LIMIT_REACHED = "PlanLimitReached"  # the tasks before it fill the plan (16 MiB)
REASON_EXCEEDS_CAPACITY = "ExceedsCapacity"  # it would not fit even alone
REASON_PIPELINE_STARTING = "PipelineStarting"  # the workers are not up yet
REASON_PREPARING_DATA = "PreparingData"  # rows are fetched and tokenised
REASON_WAITING_FOR_STORE = "WaitingForStore"  # a store does not return its rows or its checkpoint; retried
REASON_SUSPENDED = "Suspended"  # spec.suspend is true
REASON_TRAINING = "Training"
REASON_SAVING = "Saving"  # the adapter is gathered, verified and uploaded
REASON_FINISHED = "Finished"
REASON_RESTARTING = "Restarting"  # the worker group was restarted; the task will run again
REASON_PIPELINE_UPDATING = "PipelineUpdating"  # the workers are about to be replaced; no task is admitted
REASON_PIPELINE_FAILED = "PipelineFailed"  # its pipeline stays down until its spec changes
REASON_WAITING_FOR_WORKERS = "WaitingForWorkers"  # not all workers of the pipeline can be scheduled

# Reasons of Preempted.
REASON_PREEMPTED = "Preempted"  # a task that comes first takes its memory
REASON_RESUMED = "Resumed"  # the task runs again

# Reasons of UploadBlocked: those of the worker while it is True, then this one.
REASON_UPLOAD_RESUMED = "UploadResumed"  # the store accepts uploads again, or nothing is left to upload

# Reasons of Succeeded and Failed beyond those of the worker (mlora_worker.protocol.FailureReason).
REASON_ADAPTER_UPLOADED = "AdapterUploaded"
REASON_DEADLINE_EXCEEDED = "DeadlineExceeded"  # it did not start, or finish, within the time of its spec
REASON_RETRIED = "Retried"  # of an event: a failed task runs again, as its annotation asks

# Reason of an event alone.
REASON_ROWS_TRUNCATED = "RowsTruncated"  # rows are longer than maxSeqLength and were cut; the task trains on

# Reasons of Finished.
REASON_SUCCEEDED = "Succeeded"
REASON_FAILED = "Failed"

# Reasons of Ready and WorkersAvailable.
REASON_READY = "Ready"
REASON_IDLE = "Idle"  # scaled to zero
REASON_STARTING = "Starting"
REASON_STAGES_DIFFER = "StagesDiffer"  # its workers report other stages than spec.stages
REASON_POD_NOT_STARTING = "PodNotStarting"  # a pod's container waits; the message quotes the kubelet
REASON_POD_STUCK_TERMINATING = "PodStuckTerminating"  # a deleted pod stays, since its node does not respond
REASON_WORKERS_INCOMPLETE = "WorkersIncomplete"  # some could not be scheduled, so all others were released
REASON_UNREACHABLE = "CoordinatorUnreachable"
REASON_RESTART_LIMIT = "RestartLimitReached"  # the workers failed too often in a row
REASON_CANNOT_SERVE = (
    "CannotServe"  # the workers reject the model or their configuration; a retry cannot help
)

# Reasons of ServesOthers.
REASON_CROSS_NAMESPACE_NOT_ALLOWED = "CrossNamespaceNotAllowed"  # its namespace may not serve others
REASON_CROSS_NAMESPACE_ALLOWED = "CrossNamespaceAllowed"  # its namespace may serve others now

# Reasons of CertificateEnds.
REASON_ENDS_SOON = "EndsSoon"  # within 30 days
REASON_ENDED = "Ended"  # the coordinator cannot prove itself any more
REASON_RENEWED = "Renewed"  # another one is there, with a longer life

# Reasons of PlanRejected; the second also of Admitted, of a task of which that is so.
REASON_WORKERS_REJECT_PLAN = "WorkersRejectPlan"  # the whole plan: no task is admitted and no change arrives
REASON_WORKERS_REJECT_TASK = (
    "WorkersRejectTask"  # tasks that are left out of the plan, so that all others go on
)
REASON_PLAN_ACCEPTED = "PlanAccepted"  # its workers take the plan now

# Reasons of Stalled.
REASON_NO_PROGRESS = "NoProgress"  # tasks are training, but no microbatch completes
REASON_NOT_RESPONDING = "CoordinatorNotResponding"  # the workers are ready, but their coordinator times out
REASON_RESTARTED = "Restarted"  # a new worker group responds
