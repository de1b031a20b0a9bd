"""``mlora list`` and ``mlora get``.

``list_command``, ``get_command``  their options
``columns``                        what stands in a table of tasks or pipelines
``aligned``                        a table that is the same in a pipe as on a terminal
``details``                        all that a reader wants to know of one task
"""
