"""Tasks become items of the stream; what comes back becomes progress. Called with the coordinator's lock held.

``dispatcher``  what comes next, and what a result means
``issuing``     items: made, numbered, announced
``evaluations`` microbatches of evaluations
``reference_forwards`` forwards for what a reference thinks of rows
``divergence_forwards`` forwards for how far an adapter has come from its reference
``on_the_way``  how many of these go forward at a time
``evictions``   tasks that leave because memory ran out, and come back
"""
