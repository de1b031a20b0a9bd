"""``mlora sync``.

``command``         its options, read without any package, and the loop
``in_app``          the same options among the other commands
``labelled_tasks``  which adapters the tasks of a cluster have
"""
