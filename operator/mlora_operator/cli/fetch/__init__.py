"""``mlora fetch``.

``command``         its options, and what it says
``in_app``          the same options for the help of all commands
``adapter_of_task`` where a task's adapter is stored, and the keys to it
"""
