"""Which modules the entries of a LoRAConfig match: names and patterns, all that is asked at once. Pure.

The operator answers this for everybody's tasks in the one loop that it has, so a spec has a budget, counted before anything
is matched: the instructions of its patterns times the characters of all paths is the most that RE2 ever does, and
``MOST_WORK`` of that takes some tens of milliseconds. Names cost a look into a table.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mlora_worker.protocol import FailureReason, LoRAConfig
from mlora_worker.stream.patterns import LARGEST, Automaton, InvalidPattern, Pattern, compile_pattern, is_name

MOST_WORK = 5_000_000  # steps: instructions times characters; the dearest patterns take some 5 ns for one
MOST_TEXT = 4_096  # characters of all patterns of a task: to read one takes some 3 us
_SHOWN = 64  # characters of an entry in an error

Chosen = int  # a set of modules: bit i is set where the module at position i is in it


class Misfit(ValueError):
    """``str(error)`` names what does not fit, with its figure, and says what to do."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Paths:
    """Of all modules of a model, by their positions."""

    paths: tuple[str, ...]

    @cached_property
    def characters(self) -> int:
        return sum(map(len, self.paths))

    @cached_property
    def by_end(self) -> Mapping[str, tuple[int, ...]]:
        """Positions of those whose path is this, or ends so after a dot."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for position, path in enumerate(self.paths):
            end = path
            while end:
                found[end].append(position)
                end = end.partition(".")[2]
        return {end: tuple(positions) for end, positions in found.items()}

    def ending_with(self, end: str) -> Chosen:
        return sum(1 << position for position in self.by_end.get(end, ()))

    @cached_property
    def ends_by_length(self) -> Mapping[int, tuple[str, ...]]:
        found: defaultdict[int, list[str]] = defaultdict(list)
        for end in self.by_end:
            found[len(end)].append(end)
        return {length: tuple(ends) for length, ends in found.items()}


@dataclass(frozen=True, slots=True)
class Entries:
    """Those of one field. ``keys``: of ``rankPattern`` or ``alphaPattern``, where PEFT takes a name for a pattern, too: its
    dots stand for any character."""

    field: str
    names: tuple[str, ...]
    patterns: tuple[Pattern, ...]
    keys: bool = False

    @property
    def size(self) -> int:
        return sum(pattern.size for pattern in self.patterns)

    def matched(self, where: Paths) -> Mapping[str, Chosen]:
        """By entry."""
        found = {name: where.ending_with(name) for name in self.names}
        if self.keys:
            for name in self.names:
                found[name] = _with_any_dots(name, found[name], where)
        if self.patterns:
            found |= _matched(self.patterns, where, anywhere=self.keys)
        return found


@dataclass(frozen=True, slots=True)
class AllEntries:
    targets: Entries
    excluded: Entries
    ranks: Entries
    alphas: Entries

    @property
    def size(self) -> int:
        """Instructions of all patterns."""
        return sum(one.size for one in (self.targets, self.excluded, self.ranks, self.alphas))


def entries_of(lora: LoRAConfig) -> AllEntries:
    """Raises Misfit for patterns that are wrong, and for more of them than a task may have, whatever the model."""
    left = LARGEST
    made = []
    every = (lora.target_modules, lora.exclude_modules, lora.rank_pattern, lora.alpha_pattern)
    text = sum(len(entry) for entries in every for entry in entries if not is_name(entry))
    if text > MOST_TEXT:
        raise Misfit(
            FailureReason.INVALID_SPEC,
            f"lora: its patterns have {text} characters, but a task must have at most {MOST_TEXT}: use names, or "
            f"fewer and shorter "
            "patterns",
        )
    for field, entries, keys in (
        ("targetModules", lora.target_modules, False),
        ("excludeModules", lora.exclude_modules, False),
        ("rankPattern", lora.rank_pattern, True),
        ("alphaPattern", lora.alpha_pattern, True),
    ):
        one = _entries(field, entries, keys, left)
        left -= one.size
        made.append(one)
    return AllEntries(*made)


def check_work(entries: AllEntries, where: Paths) -> None:
    """Raises Misfit for patterns that are more work than this model allows."""
    work = entries.size * where.characters
    if work > MOST_WORK:
        raise Misfit(
            FailureReason.INVALID_SPEC,
            f"lora: its patterns take {entries.size} instructions, and this model, with {len(where.paths)} linear "
            f"modules, "
            f"allows {MOST_WORK // where.characters}: use names, or fewer and shorter patterns",
        )


def shown(entries: Iterable[str], most: int = 8) -> str:
    """As an error names them: a few, none of them longer than a line."""
    listed = list(entries)
    words = [one if len(one) <= _SHOWN else f"{one[:_SHOWN]}..." for one in listed[:most]]
    return ", ".join(words) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _entries(field: str, entries: Iterable[str], keys: bool, left: int) -> Entries:
    names, patterns = [], []
    for entry in dict.fromkeys(entries):
        if is_name(entry):
            names.append(entry)
            continue
        try:
            pattern = compile_pattern(entry)
        except InvalidPattern as error:
            told = f"{field}: {shown([entry])} is not a valid pattern: {error}"
            raise Misfit(FailureReason.INVALID_SPEC, told) from None
        left -= pattern.size
        if left < 0:
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"{field}: with {shown([entry])}, the patterns of lora take more than the {LARGEST} instructions "
                f"that a "
                "task may have: use names, or fewer and shorter patterns",
            )
        patterns.append(pattern)
    return Entries(field, tuple(names), tuple(patterns), keys)


def _matched(patterns: Sequence[Pattern], where: Paths, *, anywhere: bool) -> dict[str, Chosen]:
    automaton, found = Automaton(patterns, anywhere=anywhere), [0] * len(patterns)
    for position, path in enumerate(where.paths):
        for number in automaton.matches(path):
            found[number] |= 1 << position
    return {pattern.text: chosen for pattern, chosen in zip(patterns, found, strict=True)}


def _with_any_dots(name: str, found: Chosen, where: Paths) -> Chosen:
    """A name is as long as what it matches, so this takes one look at each end of that length."""
    if "." not in name:
        return found
    pattern = re.compile(name)
    for end in where.ends_by_length.get(len(name), ()):
        if pattern.fullmatch(end):
            found |= where.ending_with(end)
    return found
