"""Parts of the benchmark of the operator: the real API server, the real process, and coordinators that only speak.

``server`` talks to the API server, ``process`` holds the operator's process, ``coordinator`` is a process that speaks for
all workers, ``crowd`` applies tasks and watches them, ``warm`` is the part with real ranks.
"""
