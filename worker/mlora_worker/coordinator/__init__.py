"""The part of rank 0 that talks to the operator, prepares data and issues work.

``tasks``      what is known of one task; its way from plan to adapter
``dispatch``   turns tasks into items of the stream and results of the stream into progress
``trials``     who is to blame for a fault that came out of computing several tasks together
``explain``    what a user reads of it
``prepare``    rows and targets of a task, before it is admitted, off the critical path
``room``       will what it writes fit on the disks it goes to? asked before it trains
``publish``    a finished adapter: joined, checked, uploaded
``service``    the plan comes in, the report goes out; owns the threads
``server``     the same over HTTP
"""
