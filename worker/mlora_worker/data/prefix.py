"""Shorter ways to the tokens of a text that has added tokens such as ``<|im_start|>`` in it.

A tokenizer cuts a text at those first and treats each part alone. So what stands before one becomes the same tokens
whatever follows, and what begins with one whatever stands before. Two things follow, which together save a third of the
work: a beginning that all texts share, such as a template's own system turn, is tokenised once (``SharedBeginning``); and
to see that a text's tokens begin with those of its prompt, no prompt has to be tokenised again (``PrefixProof``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_CHARACTERS_AT_ONCE = 2_000_000
_MOST_ENDINGS = 256  # that are remembered; conversations with a template have one

Encode = Callable[[Sequence[str]], list[Any]]  # texts to ``tokenizers.Encoding``, without special tokens


def cutters_of(backend: Any) -> dict[str, int]:
    """Added tokens by text. Those that take white space beside them, or are looked for in normalised text, do not cut so
    simply; nor do those that another added token has in it."""
    added = backend.get_added_tokens_decoder()
    texts = [one.content for one in added.values()]
    return {
        one.content: number
        for number, one in added.items()
        if not (one.normalized or one.lstrip or one.rstrip or one.single_word)
        and not any(one.content in text[1:] for text in texts)
    }


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of a whole text. ``rest`` is the encoding of what follows the first ``characters`` characters, whose tokens are the
    first ``count`` of ``ids``."""

    ids: list[int]
    rest: Any
    characters: int = 0
    count: int = 0

    def at(self, character: int) -> int | None:
        """The token that has this character, in what is not shared."""
        if character < self.characters:
            return None
        token: int | None = self.rest.char_to_token(character - self.characters)
        return None if token is None else token + self.count

    def starts_at(self, token: int, character: int) -> bool:
        return bool(self.rest.token_to_chars(token - self.count)[0] == character - self.characters)


class SharedBeginning:
    """Learnt from the first texts; one that begins otherwise is tokenised whole."""

    def __init__(self, cutters: dict[str, int], encode: Encode) -> None:
        self._cutters = cutters
        self._encode = encode
        self._text: str | None = None  # of the beginning and the cutter after it; None: not looked for yet
        self._characters = 0  # of the beginning
        self._ids: list[int] = []

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        if self._text is None and len(texts) > 1:
            self._learn(texts)
        known, start = self._text, self._characters
        if not known:
            return [Tokens(one.ids, one) for one in self._encode(texts)]
        shared = [text.startswith(known) for text in texts]
        rests = self._encode([text[start:] if cut else text for text, cut in zip(texts, shared, strict=True)])
        made = []
        for one, cut in zip(rests, shared, strict=True):
            ids: list[int] = one.ids
            made.append(Tokens(self._ids + ids, one, start, len(self._ids)) if cut else Tokens(ids, one))
        return made

    def _learn(self, texts: Sequence[str]) -> None:
        self._text = ""
        common = _common_beginning(min(texts), max(texts))
        at, cutter = max(((common.rfind(name), name) for name in self._cutters), default=(-1, ""))
        if at <= 0:
            return
        text = common[: at + len(cutter)]
        (one,) = self._encode([text])
        if one.ids[-1] == self._cutters[cutter] and one.token_to_chars(len(one) - 1) == (at, len(text)):
            self._text, self._characters, self._ids = text, at, one.ids[:-1]


@dataclass(frozen=True, slots=True)
class _Ending:
    """A prompt from its last added token on."""

    text: str
    ids: list[int]  # the added token first


class PrefixProof:
    def __init__(self, cutters: dict[str, int], encode: Encode) -> None:
        self._cutters = cutters
        self._encode = encode
        self._endings: dict[str, _Ending] = {}
        self._latest: _Ending | None = None

    def lengths(self, prompts: Sequence[tuple[str, Tokens]]) -> list[int | None]:
        """Of each prompt, in tokens; None where its whole text, whose tokens stand beside it, does not begin with them."""
        found: list[int | None] = [self._by_ending(prompt, whole) for prompt, whole in prompts]
        doubtful = [place for place, length in enumerate(found) if length is None]
        # Compared and forgotten a few at a time: the prompts of one long chat are together far longer than it is.
        while doubtful:
            batch, characters = [], 0
            while doubtful and characters < _CHARACTERS_AT_ONCE:
                batch.append(doubtful.pop())
                characters += len(prompts[batch[-1]][0])
            for place, one in zip(batch, self._encode([prompts[place][0] for place in batch]), strict=True):
                ids, length = one.ids, len(one)
                found[place] = length if prompts[place][1].ids[:length] == ids else None
        return found

    def _by_ending(self, prompt: str, whole: Tokens) -> int | None:
        """None: not proven in this way."""
        ending = self._ending_of(prompt)
        if ending is None:
            return None
        at = len(prompt) - len(ending.text)
        cut = whole.at(at)
        if cut is None or not whole.starts_at(cut, at):
            return None
        stop = cut + len(ending.ids)
        return stop if whole.ids[cut:stop] == ending.ids else None

    def _ending_of(self, prompt: str) -> _Ending | None:
        if self._latest is not None and prompt.endswith(self._latest.text):
            return self._latest
        at = max((prompt.rfind(name) for name in self._cutters), default=-1)
        if at < 0:
            return None
        text = prompt[at:]
        ending = self._endings.get(text)
        if ending is None:
            (one,) = self._encode([text])
            if not one.ids or one.ids[0] not in self._cutters.values() or one.token_to_chars(0)[0] != 0:
                return None
            ending = _Ending(text, one.ids)
            if len(self._endings) < _MOST_ENDINGS:
                self._endings[text] = ending
        self._latest = ending
        return ending


def _common_beginning(first: str, last: str) -> str:
    """Of two texts, and so of all that stand between them in the order of texts."""
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    return first if same is None else first[:same]
