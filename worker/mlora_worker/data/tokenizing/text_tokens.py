"""The tokens of a whole text, and where in it each stands.

A character may be several tokens (byte-level vocabularies, byte fallback), and a token several characters: what is asked
for is how many tokens begin before a place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Coded(NamedTuple):
    ids: list[int]
    places: Any  # the ``tokenizers.Encoding``


Encode = Callable[[Sequence[str]], list[Coded]]  # without special tokens around


class TokenSpans(NamedTuple):
    """Characters at which each token begins and ends."""

    begins: list[int]
    ends: list[int]

    def begun(self, character: int) -> int:
        """How many tokens begin before this character."""
        return bisect_left(self.begins, character)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """``rest`` are those of what follows the first ``characters`` characters, which have ``count`` tokens, and are those of
    the text before a token that ``head`` has at its end."""

    ids: list[int]
    rest: Any
    characters: int = 0
    count: int = 0
    head: Any = None

    def begins_at(self, character: int) -> int | None:
        """The token that begins with this character, and all before it end before; None: ask ``places``."""
        if character < self.characters:
            return None
        token: int | None = self.rest.char_to_token(character - self.characters)
        if token is None or self.rest.token_to_chars(token)[0] != character - self.characters:
            return None
        return token + self.count

    def places(self) -> TokenSpans:
        """Of all tokens. Much slower for one place, and much faster for many."""
        rest = places_of(self.rest, self.characters)
        if not self.count:
            return rest
        head = places_of(self.head)
        return TokenSpans(head.begins[: self.count] + rest.begins, head.ends[: self.count] + rest.ends)


def places_of(encoding: Any, shift: int = 0) -> TokenSpans:
    """``shift``: the place of the encoded text's first character."""
    offsets = encoding.offsets
    return TokenSpans(
        # Some tokenizers leave out the spaces that a token begins with: one of spaces alone seems to be behind itself.
        [one - (one == end and one > 0) + shift for one, end in offsets],
        [end + shift for _, end in offsets],
    )
