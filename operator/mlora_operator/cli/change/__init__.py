"""``mlora suspend``, ``resume``, ``retry`` and ``delete``: what a user changes about tasks that are there.

``command``  their options, and what they say
``verdicts`` what there is to do about a task, or why nothing
``applying`` all tasks are looked at before the first one is changed
"""
