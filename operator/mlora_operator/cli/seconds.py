"""Durations on the command line."""

from __future__ import annotations

import re

from mlora_operator.api.units import parse_duration

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?")


def seconds(text: str) -> float:
    """Of ``90``, ``90s``, ``15m``, ``1h30m``. A number without a unit counts seconds. Raises ValueError."""
    if _NUMBER.fullmatch(text):
        return float(text)
    return parse_duration(text).total_seconds()
