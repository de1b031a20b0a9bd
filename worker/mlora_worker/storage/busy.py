"""How long a busy server asks to be left alone. Pure.

``Retry-After`` says it in seconds or as a date (RFC 9110). Hubs say it in ``RateLimit``, in either of its drafts: how much
is left of each quota, and in how many seconds it is whole again (``"api";r=0;t=200``, ``limit=9, remaining=0, reset=200``).
Others have ``RateLimit-Reset`` or ``X-RateLimit-Reset``, in seconds or as a time since 1970.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

from mlora_worker.storage.errors import StoreBusy

LONGEST: Final = 86_400.0  # seconds: whatever is asked for, it is tried once a day
UNTOLD: Final = 30.0  # seconds, where a busy server says none
_LATER_THAN = 1e9  # a larger number of seconds is a time since 1970
_LEFT = re.compile(r"\b(?:r|remaining)=(\d{1,12})\b")
_RESET = re.compile(r"\b(?:t|reset)=(\d{1,12})\b")
_MOST_READ = 2000  # characters of a header


def asked_seconds(headers: Mapping[str, str], now: datetime) -> float | None:
    """None when the answer says nothing of it. ``now``: for an answer without a date of its own."""
    named = {name.lower(): value[:_MOST_READ].strip() for name, value in headers.items()}
    then = _date(named.get("date", "")) or now
    found = _after(named.get("retry-after", ""), then)
    if found is None and "ratelimit" in named:
        found = _quota(named["ratelimit"])
    for name in ("ratelimit-reset", "x-ratelimit-reset"):
        if found is None:
            found = _after(named.get(name, ""), then)
    return None if found is None else max(0.0, min(found, LONGEST))


def busy(what: str, seconds: float | None, now: datetime) -> StoreBusy:
    """``what`` was tried and was answered, such as "cannot read x: the server answered 429"."""
    pause = UNTOLD if seconds is None else max(1.0, seconds)
    until = (now + timedelta(seconds=pause)).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    how = "it is busy" if seconds is None else f"it requests a pause of {pause:.0f} s"
    return StoreBusy(f"{what}: {how}, so the request is retried at {until}", pause)


def _after(text: str, then: datetime) -> float | None:
    if text.isdecimal():
        seconds = float(text)
        return seconds - then.timestamp() if seconds > _LATER_THAN else seconds
    date = _date(text)
    return None if date is None else (date - then).total_seconds()


def _quota(text: str) -> float | None:
    """The longest of the quotas that are used up; of all, where none says that it is."""
    resets: list[tuple[bool, float]] = []
    # The older draft has one quota, whose words are apart.
    for quota in [text] if "reset=" in text else text.split(","):
        left, reset = _LEFT.search(quota), _RESET.search(quota)
        if reset is not None:
            resets.append((left is not None and int(left[1]) == 0, float(reset[1])))
    used_up = [seconds for is_empty, seconds in resets if is_empty]
    return max(used_up or [seconds for _, seconds in resets], default=None)


def _date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
