"""Tasks become items of the stream; what comes back becomes progress. Called with the coordinator's lock held.

``dispatcher``  what comes next, and what a result means
``issuing``     items: made, numbered, announced
``evaluations`` microbatches of evaluations
``reference_forwards`` forwards for what a reference thinks of rows
``evictions``   tasks that leave because memory ran out, and come back
"""
