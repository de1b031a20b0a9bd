"""``python -m bench roofline``: how long a training step must take on a GPU, computed from shapes and a data sheet.

``devices.py``   what a device can do, by its vendor's data sheet
``parts.py``     the parts of a step, as today and with element-wise work fused: arithmetic, memory traffic, launches
``command.py``   the table, and the JSON line
"""

from bench.roofline.command import main

__all__ = ["main"]
