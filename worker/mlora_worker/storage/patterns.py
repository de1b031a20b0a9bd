"""Addresses with ``*`` in them, and which files of many are a split of a data set. Pure.

``*`` stands for any part of one name, ``**`` for any folders. Other signs have no meaning: keys may hold them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

DATA_SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
COMPRESSED_SUFFIXES: Final = (".gz", ".zst")
_PART = re.compile(r"\*\*/|\*\*|\*|[^*]+")
_STANDS_FOR = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*"}


def is_pattern(address: str) -> bool:
    return "*" in address


def fixed_folder(pattern: str) -> str:
    """The longest folder that all matches lie in, without a slash at its end."""
    return pattern.partition("*")[0].rpartition("/")[0]


def matches(pattern: str, address: str) -> bool:
    expression = "".join(_STANDS_FOR.get(part) or re.escape(part) for part in _PART.findall(pattern))
    return re.fullmatch(expression, address, re.DOTALL) is not None


def is_data_file(name: str) -> bool:
    """By its ending; a compressed one by the ending before."""
    lower = name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        lower = lower.removesuffix(suffix)
    return lower.endswith(DATA_SUFFIXES)


def of_split(names: Iterable[str], split: str) -> list[str]:
    """Those whose path has the split as a word: ``train.jsonl``, ``data/train-00000-of-00002.parquet``,
    ``train/part.csv``."""
    word = re.compile(rf"(?:^|[/_.\-]){re.escape(split)}(?:[/_.\-]|$)")
    return [name for name in names if word.search(name)]
