"""``mlora validate``.

``command``    its options
``data_check`` ``--data``: rows, as the worker would read them
"""
