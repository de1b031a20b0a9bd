"""Rows of tasks, made in a process of their own, so that what trains is not slowed by it.

``maker``     what the coordinator asks for, and the same in the thread that asks
``client``    the rank's end: a job goes there, rows come back as files that are mapped
``handle``    the process as the rank holds it: started, set up, started again
``messages``  what goes over the connections; ``errors``: what was raised there is raised here
``process``   the process itself: it loads the tokenizer, then
``server``    has a process of its own forked for each job, and ends it
``job``       what happens in that process
``bounds``    what they may take of the machine: priority, memory, threads

May import ``data``, ``storage``, ``stream`` and ``protocol``; nothing here imports torch.
"""
