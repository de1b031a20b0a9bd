"""``mlora plan``.

``command`` its options
``view``    what it prints
"""
