"""JSON files that stay in stores and on volumes: other versions of this program have written some, and will read others.

Without another ``version``, a field may be added only if a reader that does not know it may pass it over. What such a
reader would get wrong needs another number: it refuses that, and leaves the file where it is.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn, TypeVar

from mlora_worker.protocol import Message

Document = TypeVar("Document", bound=Message)

DEEPEST: Final = 64  # lists and objects within each other
_MOST_DIGITS: Final = 20  # of a whole number
# A string that does not end is taken to the end: to look for brackets in it again and again would take hours.
_BRACKETS = re.compile(rb'[\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def plain_json(data: bytes) -> Any:
    """JSON of somebody else, as far as it can be of use: no NaN, no number that is beyond a float or has more digits than
    any size, nothing that is nested without end. Raises ValueError.
    """
    _check_depth(data)
    try:
        return json.loads(
            data.decode("utf-8-sig"), parse_constant=_no_number, parse_float=_float, parse_int=_int
        )
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _check_depth(data: bytes) -> None:
    """Before anything is built. Few brackets cannot be deep."""
    if data.count(b"[") + data.count(b"{") <= DEEPEST:
        return
    depth = 0
    for found in _BRACKETS.finditer(data):
        match found.group()[:1]:
            case b"[" | b"{":
                depth += 1
                if depth > DEEPEST:
                    raise ValueError(f"is nested more than {DEEPEST} times")
            case b"]" | b"}":
                depth -= 1


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"has {text}, which is not a number")


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"has {text[:40]}, which is too large for a number")
    return number


def _int(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"has a whole number of {len(text)} digits")
    return int(text)


def read_document(kind: type[Document], data: bytes) -> Document:
    """As ``kind``, without the fields that only later versions know. Raises ValueError."""
    plain_json(data)  # the types alone would take numbers of a thousand digits
    return kind.model_validate_json(data, extra="ignore")


def version_of(data: bytes) -> object:
    """What ``data`` gives as its version, whatever else is in it; None when it is no JSON object, or has none."""
    try:
        plain = plain_json(data)
    except ValueError:
        return None
    return plain.get("version") if isinstance(plain, dict) else None
