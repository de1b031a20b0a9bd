"""A beginning that all texts share, such as a template's own system turn, is tokenised once.

A tokenizer cuts a text at added tokens such as ``<|im_start|>`` first, and treats each part alone. So what stands before
one becomes the same tokens whatever follows, and what begins with one whatever stands before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlora_worker.data.tokenizing.text_tokens import Encode, Tokens


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


class SharedBeginning:
    """Learnt from the first texts; one that begins otherwise is tokenised whole."""

    def __init__(self, cutters: dict[str, int], encode: Encode) -> None:
        self._cutters = cutters
        self._encode = encode
        self._text: str | None = None  # of the beginning and the cutter after it; None: not looked for yet
        self._characters = 0  # of the beginning
        self._ids: list[int] = []
        self._places: Any = None

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        if self._text is None and len(texts) > 1:
            self._learn(texts)
        known, start = self._text, self._characters
        if not known:
            return [Tokens(*one) for one in self._encode(texts)]
        shared = [text.startswith(known) for text in texts]
        rests = self._encode([text[start:] if cut else text for text, cut in zip(texts, shared, strict=True)])
        return [
            Tokens(self._ids + ids, places, start, len(self._ids), self._places)
            if cut
            else Tokens(ids, places)
            for (ids, places), cut in zip(rests, shared, strict=True)
        ]

    def _learn(self, texts: Sequence[str]) -> None:
        self._text = ""
        common = common_beginning(min(texts), max(texts))
        at, cutter = max(((common.rfind(name), name) for name in self._cutters), default=(-1, ""))
        if at <= 0:
            return
        text = common[: at + len(cutter)]
        ((ids, places),) = self._encode([text])
        if ids[-1] == self._cutters[cutter] and places.token_to_chars(len(ids) - 1) == (at, len(text)):
            self._text, self._characters, self._ids, self._places = text, at, ids[:-1], places


def common_beginning(first: str, last: str) -> str:
    """Of two texts, and so of all that stand between them in the order of texts."""
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    return min(first, last, key=len) if same is None else first[:same]
