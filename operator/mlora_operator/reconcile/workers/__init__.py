"""A pipeline's workers. Pure.

``demand`` for whom they run
``gang``   all of them start, or none stays
``health`` do they answer, and what is done when they do not

May import ``admission`` and ``state``.
"""
