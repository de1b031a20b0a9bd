"""The part of rank 0 that talks to the operator, prepares data and issues work.

``service``     the plan comes in, the report goes out; owns the threads
``parts``       what it works with
``dispatch``    tasks become items of the stream; the stream's results become progress
``metrics``     what it counts

``http``        its server
``task``        what is known of one task: its way from plan to adapter, its faults, its report
``preparation`` rows and targets of a task, before it is admitted
``uploads``     checkpoints and finished adapters on their way to a store
"""
