"""``mlora fetch``.

``command``         its options, and what it says
``adapter_of_task`` where a task's adapter is stored, and the keys to it
"""
