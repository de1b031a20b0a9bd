"""The one ordered stream of work: its items, the rule that issues them, the grouping of tasks. Pure: no torch, no I/O.

Rank 0 decides, one after the other, what enters the pipeline, and numbers it. Every rank sees the same items in the same
order, so nothing has to be negotiated and the stream can be replayed without devices.
"""
