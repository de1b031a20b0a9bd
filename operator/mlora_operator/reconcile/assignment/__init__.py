"""Which pipeline serves a task, and whether its output is its own. Pure.

``assign``           all unfinished tasks together: what one may have depends on what others have
``eligibility``      one task: a pipeline that serves it, or the reason why none does
``fit``              does a task fit into the memory of a pipeline at all, and beside those that are there?
``replicas``         the copies of a pipeline, and which of them a task goes to
``priority_bounds``  how high a task's priority may be
``queue_limits``     how many tasks of a namespace may wait
``output_conflicts`` two tasks, one output
``output_claims``    what a task's claim to its output is worth
``cache``            what is remembered of all that

May import ``status``, ``workers``, ``admission`` and ``state``.
"""
