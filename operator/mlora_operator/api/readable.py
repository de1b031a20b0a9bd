"""A status as far as it can be read. Pure.

Whoever may write statuses may have written anything there, and a former version other things than this one. What is out of
its bounds, or not what stands there, is as if it were not there; the rest holds. Above all the conditions: a task whose
status lost them for one wrong number elsewhere would be unfinished again, and would train once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from mlora_operator.api.meta import Status

AnyStatus = TypeVar("AnyStatus", bound=Status)
Location = tuple[int | str, ...]

_TRIES = 8  # what is left out may be required where it stood, so that the part around it goes next


def readable(model: type[AnyStatus], document: object) -> AnyStatus:
    """``document`` as a ``model`` without what cannot be read. Never raises."""
    for _ in range(_TRIES):
        try:
            return model.model_validate(document)
        except ValidationError as error:
            wrong = [one["loc"] for one in error.errors(include_input=False, include_url=False)]
        document = _without(document, wrong)
    return model()


def _without(document: object, wrong: Iterable[Location]) -> object:
    """A copy in which what stands at these places is left out; where nothing stands, what is around it."""
    gone = {_standing(document, place) for place in wrong}
    return _copy(document, (), gone) if () not in gone else {}


def _standing(document: Any, place: Location) -> Location:
    """``place``, as far as something stands there."""
    found = document
    for depth, part in enumerate(place):
        try:
            found = found[part]
        except (LookupError, TypeError):  # also at the mark "[key]" of a key that is wrong itself
            return place[:depth]
    return place


def _copy(value: Any, place: Location, gone: set[Location]) -> object:
    if isinstance(value, Mapping):
        return {
            key: _copy(inner, (*place, key), gone)
            for key, inner in value.items()
            if (*place, key) not in gone
        }
    if isinstance(value, list | tuple):
        return [
            _copy(inner, (*place, number), gone)
            for number, inner in enumerate(value)
            if (*place, number) not in gone
        ]
    return value
