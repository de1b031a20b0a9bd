"""A pipeline's workers. Pure.

``demand`` for whom they run
``scale``  how many there shall be, and which must go
``gang``   all of them start, or none stays
``health`` do they answer, and what is done when they do not

May import ``admission`` and ``state``.
"""
