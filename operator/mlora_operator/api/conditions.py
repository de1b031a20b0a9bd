"""Condition types and reasons: each constant with its sentence. docs/users/conditions.md lists the same."""

from __future__ import annotations

# Types of a LoRATask.
ACCEPTED = "Accepted"  # the spec is valid and a pipeline serves the base model
ADMITTED = "Admitted"  # the task has a place in the pipeline's memory
RUNNING = "Running"  # steps are being trained
PREEMPTED = "Preempted"  # a task of higher priority took the place; it comes back by itself
UPLOAD_BLOCKED = "UploadBlocked"  # the store refuses the adapter or a checkpoint; tried again
SUCCEEDED = "Succeeded"  # the adapter is in the store, checked
FAILED = "Failed"  # it ended without an adapter; reason and message say why

# Types of a LoRAPipeline.
READY = "Ready"  # all stages have loaded the model and the coordinator answers
WORKERS_AVAILABLE = "WorkersAvailable"  # all worker pods of the current group run
SERVES_OTHERS = "ServesOthers"  # tasks of other namespaces, as its allowedNamespaces says
STALLED = "Stalled"  # tasks train but nothing moves; the group is started anew

# Reasons of Accepted.
REASON_ACCEPTED = "Accepted"
REASON_INVALID_SPEC = "InvalidSpec"  # a field is wrong beyond what the schema can say
REASON_NO_PIPELINE = "NoPipelineForModel"  # no pipeline serves the base model and none may be created for it
REASON_NAMESPACE_NOT_ALLOWED = "NamespaceNotAllowed"  # the pipeline does not take tasks of this namespace
REASON_SECRET_NOT_FOUND = "SecretNotFound"  # storage.secretRef names a Secret that is not there (yet)
REASON_CONFIG_MAP_NOT_FOUND = (
    "ConfigMapNotFound"  # dataset.configMapRef names one, or a key, that is not there (yet)
)
REASON_SECRET_INCOMPLETE = "SecretIncomplete"  # it lacks one of the two AWS keys, or has none that can be one
REASON_UNREADABLE = (
    "Unreadable"  # a Secret, a ConfigMap or labels could not be read: nobody knows whether they do
)
REASON_OUTPUT_IN_USE = (
    "OutputInUse"  # another task, a pipeline or the task's own rows have the output's place
)
REASON_OUTPUT_TAKEN = "OutputTaken"  # a task of another namespace has it
REASON_OUTPUT_NOT_ALLOWED = "OutputNotAllowed"  # that place was given to other namespaces
REASON_ENDPOINT_NOT_ALLOWED = "EndpointNotAllowed"  # an address that only the worker or its machine can reach
REASON_NAMESPACE_LIMIT = "NamespaceLimit"  # its namespace has as many tasks there as the pipeline takes
REASON_CREATING_PIPELINE = (
    "CreatingPipeline"  # a pipeline for the base model is being made from the catalogue
)

# Reason of Accepted of a task, and of Ready of a pipeline.
REASON_UNDECIDED = "Undecided"  # deciding about this very object fails; it stays as it is, all others go on

# Reasons of Admitted and Running.
REASON_ADMITTED = "Admitted"
REASON_WAITING_FOR_MEMORY = "WaitingForMemory"  # others with a better place fill the memory
REASON_PLAN_FULL = "PlanFull"  # the tasks before it are as much as the workers are told at once
REASON_EXCEEDS_CAPACITY = "ExceedsCapacity"  # would not fit even alone
REASON_PIPELINE_STARTING = "PipelineStarting"  # workers are not up yet
REASON_PREPARING_DATA = "PreparingData"  # rows are fetched and tokenised
REASON_WAITING_FOR_STORE = "WaitingForStore"  # the store does not give its checkpoint; tried again
REASON_SUSPENDED = "Suspended"  # spec.suspend is true
REASON_TRAINING = "Training"
REASON_SAVING = "Saving"  # adapter is gathered, checked and uploaded
REASON_FINISHED = "Finished"
REASON_RESTARTING = "Restarting"  # the worker group was restarted; the task will run again
REASON_PIPELINE_UPDATING = "PipelineUpdating"  # the workers are to be replaced; nobody new is let in before
REASON_PIPELINE_FAILED = "PipelineFailed"  # its pipeline is not started again before someone acts
REASON_WAITING_FOR_WORKERS = "WaitingForWorkers"  # not all workers of the pipeline get a place

# Reasons of Preempted.
REASON_PREEMPTED = "PreemptedByPriority"  # a task that goes first has the place
REASON_RESUMED = "Resumed"  # the task runs again

# Reasons of UploadBlocked: those of the worker while it is True, then this one.
REASON_UPLOAD_GOES_ON = (
    "UploadGoesOn"  # the store takes the adapter again, or there is nothing left to upload
)

# Reasons of Succeeded and Failed beyond those of the worker (mlora_worker.protocol.FailureReason).
REASON_ADAPTER_UPLOADED = "AdapterUploaded"
REASON_DEADLINE_EXCEEDED = (
    "DeadlineExceeded"  # it did not start, or was not done, in the time that its spec gives
)
REASON_RETRIED = "Retried"  # of an event: a failed task runs again, as its annotation asks

# Reasons of Ready and WorkersAvailable.
REASON_READY = "Ready"
REASON_IDLE = "Idle"  # scaled to zero
REASON_STARTING = "Starting"
REASON_POD_NOT_STARTING = "PodNotStarting"  # a pod's container waits; the message has the kubelet's words
REASON_POD_NOT_ENDING = "PodNotEnding"  # a deleted pod stays, since its node does not answer
REASON_WORKERS_INCOMPLETE = "WorkersIncomplete"  # some got no place, so the others were given back for now
REASON_UNREACHABLE = "CoordinatorUnreachable"
REASON_RESTART_LIMIT = "RestartLimitReached"  # the workers failed too often in a row
REASON_CANNOT_SERVE = (
    "CannotServe"  # the workers refuse the model or their configuration; trying again would not help
)

# Reasons of ServesOthers.
REASON_OWN_NAMESPACE_ONLY = "OwnNamespaceOnly"  # its namespace has no right to serve others
REASON_RIGHT_GIVEN = "RightGiven"  # it has that right now

# Reasons of Stalled.
REASON_NO_PROGRESS = "NoProgress"  # tasks train, but no microbatch comes back
REASON_SILENT = "CoordinatorSilent"  # the workers are ready, but their coordinator does not answer
REASON_STARTED_ANEW = "StartedAnew"  # another group speaks now
