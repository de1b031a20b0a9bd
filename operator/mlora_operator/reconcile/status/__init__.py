"""What users read of tasks and pipelines: conditions, messages, counts. Pure.

``task``              a task's status; ``task_progress``: its figures
``pipeline``          a pipeline's status; ``pipeline_summary``: what of it tasks' statuses depend on
``conditions``        how a condition changes, and the events that say so
``admission_message`` why a task waits
``interruptions``     why a task stopped training for a while
``lifetime``          deadlines, and when a finished task is removed; ``retries``: when it is tried again
``closed_ports``      the network policy, where it is the likely cause
``plan_rejected``     what workers do not take of a plan
``undecided``         of an object about which no decision can be made
``incremental``       statuses are worked out again only where something has changed

May import ``workers``, ``admission`` and ``state``.
"""
