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

Reached = bytearray  # [length + 1]: 1 where the parts so far may have ended


def is_pattern(address: str) -> bool:
    return "*" in address


def fixed_folder(pattern: str) -> str:
    """The longest folder that all matches lie in, without a slash at its end."""
    return pattern.partition("*")[0].rpartition("/")[0]


def matches(pattern: str, address: str) -> bool:
    """One sweep over the address for each part of the pattern: no pattern takes more than parts times length."""
    reached = Reached(len(address) + 1)
    reached[0] = 1
    for part in _PART.findall(pattern):
        if part == "**/":
            reached = _after_folders(reached, address)
        elif part.startswith("*"):
            reached = _after_any(reached, address, within_name=part == "*")
        else:
            reached = _after_literal(reached, address, part)
        if 1 not in reached:
            return False
    return reached[-1] == 1


def _after_any(reached: Reached, address: str, *, within_name: bool) -> Reached:
    after = Reached(len(reached))
    at = reached.find(1)
    while at >= 0:
        slash = address.find("/", at) if within_name else -1
        last = slash if slash >= 0 else len(address)
        after[at : last + 1] = b"\1" * (last + 1 - at)
        at = reached.find(1, last + 1)
    return after


def _after_folders(reached: Reached, address: str) -> Reached:
    """Any number of folders, each with a name and its slash."""
    after, inside = Reached(len(reached)), 0  # inside: a folder's name has begun before this position
    for at, begins in enumerate(reached):
        slash = at > 0 and address[at - 1] == "/"
        before = at > 0 and after[at - 1]  # a name may begin at the position before
        if slash:
            after[at], inside = begins | inside, 0
        else:
            after[at] = begins
            inside |= before
    return after


def _after_literal(reached: Reached, address: str, text: str) -> Reached:
    after = Reached(len(reached))
    at = address.find(text)
    while at >= 0:
        after[at + len(text)] = reached[at]
        at = address.find(text, at + 1)
    return after


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
