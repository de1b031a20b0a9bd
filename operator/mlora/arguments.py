"""What a caller gives, checked where types alone do not: in notebooks nobody runs a type checker."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from mlora.errors import InvalidInput
from mlora_operator.cli.seconds import seconds
from mlora_operator.local.adapt import Device, Dtype
from mlora_worker.protocol import QuantizationType

# As Kubernetes takes them: an optional DNS name and a slash, then a name; a value may be empty.
_LABEL_PREFIX = re.compile(r"(?=.{1,253}/)[a-z0-9]([-a-z0-9.]*[a-z0-9])?/")
_LABEL_WORD = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def check_names(*names: object) -> None:
    """Raises InvalidInput for what is no name of a task."""
    for name in names:
        if not isinstance(name, str) or not name:
            raise InvalidInput(
                f"{name!r} is not the name of a task: give text, several names one after another"
            )


def check_labels(labels: object) -> None:
    """Raises InvalidInput for what the API server would refuse."""
    for key, value in texts("labels", labels).items():
        name = key[prefix.end() :] if (prefix := _LABEL_PREFIX.match(key)) else key
        if not _LABEL_WORD.fullmatch(name):
            raise InvalidInput(
                f"labels: {key!r} is not the key of a label: use letters, digits, '-', '_' and '.'"
            )
        if value and not _LABEL_WORD.fullmatch(value):
            raise InvalidInput(
                f"labels: {value!r} is not the value of a label: use at most 63 letters, digits, '-', '_' and '.'"
            )


def check_selector(labels: object) -> None:
    if labels is not None and not isinstance(labels, str):
        raise InvalidInput(f"labels={labels!r}: give a selector as text, such as 'team=search'")


def check_machine(
    stages: object, threads: object, dtype: object, quantization: object, device: object, restarts: object
) -> None:
    """Of this machine. Raises InvalidInput."""
    for what, count in (("stages", stages), ("threads", threads)):
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise InvalidInput(f"{what}={count!r}: give a whole number from 1 on")
    if restarts is not None and (not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0):
        raise InvalidInput(f"restarts={restarts!r}: give a whole number from 0 on")
    for what, word, known in (
        ("dtype", dtype, (None, *get_args(Dtype))),
        ("quantization", quantization, (None, *get_args(QuantizationType))),
        ("device", device, get_args(Device)),
    ):
        if word not in known:
            raise InvalidInput(f"{what}={word!r}: give one of {', '.join(map(repr, known))}")


def texts(what: str, given: object) -> Mapping[str, str]:
    """Text by text, such as ``{"team": "search"}``. Raises InvalidInput, which shows no value: it may be a key."""
    found = mapping(what, given)
    for key, value in found.items():
        if not isinstance(value, str):
            raise InvalidInput(f"{what}[{key!r}] is not text: put it in quotes")
    return found


def mapping(what: str, given: object) -> Mapping[str, Any]:
    """Anything by text; nothing for None. Raises InvalidInput."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidInput(
            f"{what} is of type {type(given).__name__}: give a dict, such as {{'name': 'value'}}"
        )
    for key in given:
        if not isinstance(key, str) or not key:
            raise InvalidInput(f"{what}: {key!r} is not a name: give text")
    return given


def path(what: str, given: str | PathLike[str]) -> Path:
    """Raises InvalidInput."""
    try:
        return Path(given)
    except TypeError:
        raise InvalidInput(f"{what}={given!r}: give a path") from None


def duration(timeout: float | str | None) -> float | None:
    """In seconds; None is no limit. Raises InvalidInput."""
    if timeout is None:
        return None
    try:
        given = seconds(timeout) if isinstance(timeout, str) else timeout
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"timeout={timeout!r}: {error}") from error
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not math.isfinite(given) or given < 0:
        raise InvalidInput(
            f"timeout={timeout!r}: give seconds from 0 on, text such as '15m', or None for no limit"
        )
    return float(given)
