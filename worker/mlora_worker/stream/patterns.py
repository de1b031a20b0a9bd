"""Patterns of module paths: the regular expressions that PEFT takes, without those that can run for ever. Pure.

A user's pattern is matched in the operator, which serves many users: a backtracking matcher would let one pattern such as
``(.*)*x`` stop it for all. Here a pattern is a tree, and matching moves sets of positions through it. What is repeated is
tried at most once at each position of the path, however deep repeats are nested: the work grows with the pattern's size and
a low power of the path's length, and with nothing else.

Known are literals, ``.``, ``\\d``, ``\\w``, escaped punctuation, classes ``[a-z]``, groups, ``|`` and the repeats
``* + ? {m} {m,} {m,n}``; they mean what they mean in Python's ``re``. Not known: references, looking around, flags, anchors
(a pattern is always the whole path).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|\(|\)|\||[*+?]\??|\{\d+(?:,\d*)?\}\??|.", re.DOTALL
)
_NAME = re.compile(r"[\w.-]+")
_LONGEST_REPEAT = 1000

Positions = int  # a set: bit i is set where position i of the path is in it


@dataclass(frozen=True, slots=True)
class Search:
    """One path that is matched, and what is known so far: where a repeated part ends that begins at one position."""

    path: str
    known: dict[tuple[Matcher, int], Positions] = field(default_factory=dict)


Matcher = Callable[[Search, Positions], Positions]  # where a part may end that begins at these positions


class InvalidPattern(ValueError):
    """``str(error)`` says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """``str(pattern)`` is what the user wrote."""

    text: str
    matcher: Matcher

    def fullmatch(self, path: str) -> bool:
        return self._ends(path, 1)

    def matches_end(self, path: str) -> bool:
        """Whether it is the whole path or what follows one of its dots: PEFT's rule for keys of ``rank_pattern``."""
        return self._ends(path, 1 | sum(2 << index for index, char in enumerate(path) if char == "."))

    def _ends(self, path: str, starts: Positions) -> bool:
        return bool(self.matcher(Search(path), starts) >> len(path))


def is_name(text: str) -> bool:
    """Letters, digits, ``_``, ``-`` and dots: such an entry is a name, all others are patterns."""
    return _NAME.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def compile_pattern(text: str) -> Pattern:
    """Raises InvalidPattern."""
    parser = _Parser(text)
    matcher = parser.alternatives()
    if parser.next is not None:
        raise InvalidPattern("a ) has no (")
    return Pattern(text, matcher)


class _Parser:
    """alternatives := sequence ("|" sequence)*;  sequence := (atom repeat?)*"""

    def __init__(self, text: str) -> None:
        self._tokens: Iterator[str] = (match.group() for match in _TOKEN.finditer(text))
        self.next: str | None = next(self._tokens, None)

    def _take(self) -> str:
        token = self.next
        assert token is not None
        self.next = next(self._tokens, None)
        return token

    def alternatives(self) -> Matcher:
        branches = [self._sequence()]
        while self.next == "|":
            self._take()
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]

        def run(search: Search, starts: Positions) -> Positions:
            ends = 0
            for branch in branches:
                ends |= branch(search, starts)
            return ends

        return run

    def _sequence(self) -> Matcher:
        parts: list[Matcher] = []
        while self.next is not None and self.next not in ("|", ")"):
            atom = self._atom()
            if self.next is not None and _repeats(self.next):
                atom = _repeated(atom, *_bounds(self._take()))
                if self.next is not None and _repeats(self.next):
                    raise InvalidPattern(f"{self.next} repeats a repeat")
            parts.append(atom)

        def run(search: Search, positions: Positions) -> Positions:
            for part in parts:
                positions = part(search, positions)
            return positions

        return run

    def _atom(self) -> Matcher:
        token = self._take()
        if token in ("(", "(?:"):
            if self.next is not None and self.next.startswith("?"):
                raise InvalidPattern("groups with (?...) are not known, but for (?:...)")
            inner = self.alternatives()
            if self.next != ")":
                raise InvalidPattern("a ( has no )")
            self._take()
            return inner
        if _repeats(token):
            raise InvalidPattern(f"{token} repeats nothing")
        if token in ("^", "$", "[", "\\"):
            raise InvalidPattern(f"{token} is not known; a pattern is always the whole path")
        if token.startswith("\\") and token[1].isalnum() and token not in (r"\d", r"\w"):
            raise InvalidPattern(f"{token} is not known")
        try:
            char = re.compile(token, re.DOTALL)
        except re.error as error:
            raise InvalidPattern(f"{token}: {error}") from None

        def run(search: Search, starts: Positions) -> Positions:
            path, ends = search.path, 0
            for at in _each(starts):
                if at < len(path) and char.fullmatch(path[at]):
                    ends |= 2 << at
            return ends

        return run


def _repeats(token: str) -> bool:
    return token[0] in "*+?" or (token[0] == "{" and len(token) > 1)


def _bounds(token: str) -> tuple[int, int | None]:
    """Fewest and most times; None: any number. Whether it is greedy decides nothing for a whole match."""
    if token[0] in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[token[0]]
    low, comma, high = token.rstrip("?")[1:-1].partition(",")
    most = int(high) if high else (None if comma else int(low))
    if max(int(low), most or 0) > _LONGEST_REPEAT or (most is not None and most < int(low)):
        raise InvalidPattern(f"{token} is no number of times")
    return int(low), most


def _repeated(part: Matcher, least: int, most: int | None) -> Matcher:
    def once(search: Search, starts: Positions) -> Positions:
        ends = 0
        for at in _each(starts):
            found = search.known.get((part, at))
            if found is None:
                found = search.known[part, at] = part(search, 1 << at)
            ends |= found
        return ends

    def run(search: Search, starts: Positions) -> Positions:
        for _ in range(least):
            after = once(search, starts)
            if after == starts:  # nothing is left, or more times reach no more
                break
            starts = after
        reached, fresh, times = starts, starts, least
        while fresh and (most is None or times < most):
            fresh = once(search, fresh) & ~reached
            reached |= fresh
            times += 1
        return reached

    return run


def _each(positions: Positions) -> Iterator[int]:
    while positions:
        lowest = positions & -positions
        yield lowest.bit_length() - 1
        positions ^= lowest
