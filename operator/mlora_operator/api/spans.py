"""Spans of time as people read them in a column. Pure."""

from __future__ import annotations

_UNITS = (("y", 365 * 86400), ("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def span(seconds: float) -> str:
    """The two largest units, such as ``3m20s``, ``5h`` or ``12d``; the second one only where the first is small."""
    left = max(0, int(seconds))
    for place, (unit, size) in enumerate(_UNITS):
        if left >= size:
            count, rest = divmod(left, size)
            if count < 10 and place + 1 < len(_UNITS):
                smaller, its_size = _UNITS[place + 1]
                second = rest // its_size
                return f"{count}{unit}{second}{smaller}" if second else f"{count}{unit}"
            return f"{count}{unit}"
    return "0s"
