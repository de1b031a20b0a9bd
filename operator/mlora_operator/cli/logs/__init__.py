"""``mlora logs``.

``command`` its options, and whom it asks
``story``   what happened to a task, in the order of time
"""
