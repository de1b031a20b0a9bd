"""``mlora submit``: apply tasks, wait for them, and end with a status that CI understands.

``command``   its options
``manifests`` what is submitted
``applying``  how it is applied; ``conflict``: where another object is in the way
``awaiting``  until the tasks have finished; ``follow``: one task's way there
``journal``   what was said already
``outcomes``  the exit status
``output``    what it prints
"""
