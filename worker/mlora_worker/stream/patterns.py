"""Patterns of module paths: the regular expressions that PEFT takes, matched by RE2. Pure.

A user's pattern is matched in the operator, which serves many users: a backtracking matcher would let one pattern such as
``(.*)*x`` stop it for all. RE2 takes time that is linear in the path, and all patterns of a field go through it together
(``Automaton``). What that costs is known before: ``Pattern.size`` times the characters of the paths, see ``targets.py``.

A pattern that is known here means what it means in Python's ``re``, which PEFT asks, and which must take it, too: keys of
``rank_pattern`` are published as they are. What RE2 cannot express is refused by its name: looking around, references to
groups, conditions, possessive repeats. So is what the two read differently, such as ``[[:alpha:]]``, and flags. Paths of
modules are ASCII, and so are patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import re2

LARGEST = 2_000  # instructions of all patterns of a task; a pattern has about as many as a path that it matches is long

_NAME = re.compile(r"[\w.-]+")
_TOKEN = re.compile(
    r"""\\x[0-9a-fA-F]{2} | \\.                # an escape
    | \[\^?\]?(?:\\.|[^\]\\])*\]               # a class
    | \(\?P<\w+> | \(\?(?:P[=>]|<[=!]|.)?      # the beginning of a special group
    | \{,\d*\}                                 # a repeat without its least number
    | .""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\x[0-9a-fA-F]{2}|\\.", re.DOTALL)
_CLASSES = frozenset("dDwWsS")  # letters of escapes that both know
_CHARACTERS = frozenset("tnrfva")
_PLACES = frozenset("bBA")
# Python warns of them in a class, and may give them another meaning; RE2 has one for [: already.
_AMBIGUOUS = re.compile(r"\[|--|&&|\|\||~~")
_CANNOT = {
    "(?=": "it looks ahead",
    "(?!": "it looks ahead",
    "(?<=": "it looks behind",
    "(?<!": "it looks behind",
    "(?P=": "it refers to a group",
    "(?(": "it has a condition",
    "(?>": "it has an atomic group",
    "(?#": "it has a comment",
}
_FOR_ONE = 2**17  # bytes that RE2 may take to compile one pattern: some 1.3 times what ``LARGEST`` needs
_FOR_ALL = 2**24  # bytes for the states that an automaton is in: an ample number of the largest ones


class InvalidPattern(ValueError):
    """``str(error)`` says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """``text`` is what the user wrote, ``source`` the same for RE2, ``size`` its instructions there."""

    text: str
    source: bytes
    size: int


class Automaton:
    """Patterns that are looked for at once. ``anywhere``: after any dot of a path, which is PEFT's rule for the keys of
    ``rank_pattern``; else the whole path."""

    def __init__(self, patterns: Sequence[Pattern], *, anywhere: bool = False) -> None:
        options = _options(_FOR_ALL)
        self._set = re2.Set.FullMatchSet(options)
        before = rb"(?:.*\.)?" if anywhere else b""
        for one in patterns:
            self._set.Add(before + b"(?:" + one.source + b")")
        self._set.Compile()

    def matches(self, path: str) -> Iterable[int]:
        """Numbers of the patterns that match ``path``, in no order that matters."""
        return self._set.Match(path.encode("ascii", "replace")) or ()


def is_name(text: str) -> bool:
    """Letters, digits, ``_``, ``-`` and dots: such an entry is a name, all others are patterns."""
    return _NAME.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def compile_pattern(text: str) -> Pattern:
    """Raises InvalidPattern."""
    if not text.isascii():
        odd = next(char for char in text if not char.isascii())
        raise InvalidPattern(f"it has the character {odd!r}, but module paths are ASCII: leave it out")
    source = "".join(_translated(token) for token in _TOKEN.findall(text)).encode()
    try:
        size = int(re2.compile(source, _options(_FOR_ONE)).programsize)
    except re2.error as error:
        raise InvalidPattern(_in_plain_words(error.args[0])) from None
    if size > LARGEST:
        raise InvalidPattern(_TOO_LARGE)
    try:
        re.compile(text)
    except (re.error, RecursionError) as error:
        raise InvalidPattern(f"Python's re, which PEFT uses, rejects it: {error}") from None
    return Pattern(text, source, size)


_TOO_LARGE = (
    f"it takes more than {LARGEST} instructions, the most for all patterns of a task together: repeat less"
)


# What RE2 says, up to a colon with the part that is wrong.
_WORDS = {
    "no argument for repetition operator": "{} has nothing to repeat",
    "bad repetition operator": "{} repeats a repeat",
    "invalid repetition size": "{} is not a valid repeat count: use at most 1000, with the smaller number first",
    "invalid character class range": "{} is not a valid range of characters",
    "missing )": "a ( has no )",
    "unexpected )": "a ) has no (",
    "missing ]": "a [ has no ]",
    "trailing \\": "it ends in the middle of an escape",
}


def _in_plain_words(error: bytes | str) -> str:
    told = error.decode("ascii", "replace") if isinstance(error, bytes) else error
    if "too large" in told:
        return _TOO_LARGE
    what, _, part = told.partition(": ")
    return _WORDS[what].format(part) if what in _WORDS else told


def _translated(token: str) -> str:
    """As RE2 has it. Raises InvalidPattern for what it does not have, or reads otherwise than Python."""
    if token.startswith("\\"):
        return _escape(token, _CLASSES | _CHARACTERS | _PLACES | {"Z"})
    if token.startswith("[") and len(token) > 1:
        odd = _AMBIGUOUS.search(_ESCAPE.sub("", token[1:]))
        if odd is not None:
            raise InvalidPattern(f"{odd.group()} has two meanings in a class: escape it with \\")
        return _ESCAPE.sub(lambda found: _escape(found.group(), _CLASSES | _CHARACTERS), token)
    if token.startswith("(?") and token != "(?:" and not token.startswith("(?P<"):
        told = _CANNOT.get(token, "it sets flags or has a group of an unknown kind")
        raise InvalidPattern(
            f"{told} ({token}), which is not supported: write what matches, with | and classes"
        )
    if token.startswith("{,"):
        return "{0" + token[1:]
    return token


def _escape(token: str, known: frozenset[str]) -> str:
    letter = token[1:2]
    if letter == "x" and len(token) == 4:
        return token
    if letter.isdigit():
        raise InvalidPattern(
            f"it refers to a group ({token}), which is not supported: write out what matches"
        )
    if letter.isalpha() and letter not in known:
        raise InvalidPattern(f"{token} is not supported")
    return r"\z" if letter == "Z" else token


def _options(bytes_: int) -> re2.Options:
    options = re2.Options()
    options.max_mem = bytes_
    options.encoding = re2.Options.Encoding.LATIN1  # a character is one instruction
    options.never_capture = True
    options.log_errors = False
    return options
