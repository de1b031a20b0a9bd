"""Finds what in a type has no bound: a walk over everything that is reachable from a pydantic model."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

_LISTS = (tuple, list, set, frozenset)


def unbounded(model: type[BaseModel], justified: Iterable[Any] = ()) -> list[str]:
    """Path and kind of each number, text, list or mapping below ``model`` that may be of any size. ``justified``: types
    that are left out, compared with what stands at the field."""
    return sorted(set(_of_model(model, model.__name__, set(), tuple(justified))))


def _of_model(
    model: type[BaseModel], path: str, seen: set[type], justified: tuple[Any, ...]
) -> Iterator[str]:
    if model in seen:
        return
    seen.add(model)
    hints = get_type_hints(model, include_extras=True)
    for name, field in model.model_fields.items():
        if hints[name] not in justified:
            yield from _of_type(hints[name], field.metadata, f"{path}.{name}", seen, justified)


def _of_type(
    type_: Any, metadata: Iterable[Any], path: str, seen: set[type], justified: tuple[Any, ...]
) -> Iterator[str]:
    told = list(_flat(metadata))
    if type_ in justified:
        return
    if get_origin(type_) is Annotated:
        inner, *more = get_args(type_)
        yield from _of_type(inner, [*told, *more], path, seen, justified)
    elif get_origin(type_) in (Union, types.UnionType):
        alternatives = [one for one in get_args(type_) if one is not type(None)]
        for one in alternatives:
            yield from _of_type(one, told, path, seen, justified)
    elif get_origin(type_) is Literal or type_ in (bool, type(None)):
        return
    elif get_origin(type_) in _LISTS:
        arguments = get_args(type_)
        fixed = get_origin(type_) is tuple and Ellipsis not in arguments
        if not fixed and not _has(told, MaxLen):
            yield f"{path}: a list of any length"
        for one in arguments:
            if one is not Ellipsis:
                yield from _of_type(one, (), f"{path}[]", seen, justified)
    elif get_origin(type_) is dict:
        key, value = get_args(type_)
        if not _has(told, MaxLen):
            yield f"{path}: a mapping of any length"
        yield from _of_type(key, (), f"{path} (key)", seen, justified)
        yield from _of_type(value, (), f"{path}[]", seen, justified)
    elif isinstance(type_, type) and issubclass(type_, BaseModel):
        yield from _of_model(type_, f"{path}:{type_.__name__}", seen, justified)
    elif isinstance(type_, type) and issubclass(type_, Enum):
        return
    elif type_ in (str, SecretStr, bytes):
        if not _has(told, MaxLen):
            yield f"{path}: a text of any length"
    elif type_ in (int, float):
        if not _has(told, Ge, Gt):
            yield f"{path}: a number with no least value"
        if not _has(told, Le, Lt):
            yield f"{path}: a number with no greatest value"
    else:
        yield f"{path}: {type_} is a type that has no bound"


def _has(metadata: Iterable[Any], *kinds: type) -> bool:
    return any(isinstance(one, kinds) for one in metadata)


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from one.metadata
        else:
            yield one
