"""Quantities and durations as Kubernetes writes them."""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction
from functools import lru_cache

_BINARY = {unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)}
_DECIMAL = {unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), start=1)}
_FACTORS: dict[str, Fraction] = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    **{unit: Fraction(factor) for unit, factor in (_BINARY | _DECIMAL).items()},
}
_QUANTITY = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$")
# Nobody waits longer, and before or after any date that people write there is still room for so much.
LONGEST = timedelta(days=100 * 365)
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_SECONDS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}


@lru_cache(maxsize=1024)
def parse_bytes(quantity: str) -> int:
    """Bytes of a quantity such as ``20Gi`` or ``1.5G``, rounded down. Raises ValueError."""
    match = _QUANTITY.match(quantity)
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity such as 20Gi")
    return int(Fraction(match[1]) * _FACTORS[match[2] or ""])


@lru_cache(maxsize=1024)
def parse_duration(text: str) -> timedelta:
    """A duration such as ``10m`` or ``1h30m``, at most ``LONGEST``. Raises ValueError."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a duration such as 10m or 1h30m")
    seconds = sum((Fraction(number) * _SECONDS[unit] for number, unit in parts), Fraction(0))
    if seconds >= int(LONGEST.total_seconds()):
        return LONGEST
    return timedelta(microseconds=int(seconds * 1_000_000))


def show_bytes(count: int) -> str:
    """For people: ``1.50 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
