"""How many tokens a prompt has, and that a longer text's tokens begin with them.

Tokenising each prompt a second time would take half as long as the rows themselves. It is not needed where the prompt
holds an added token such as ``<|im_start|>``: the tokenizer cuts a text at those first and treats each part alone, so
what stands before the last one becomes the same tokens whatever follows. Only the part from that token on is in doubt,
and it is nearly always the same few words, whose tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_CHARACTERS_AT_ONCE = 2_000_000
_MOST_ENDINGS = 256  # that are remembered; conversations with a template have one


@dataclass(frozen=True, slots=True)
class _Ending:
    """A prompt from its last added token on."""

    text: str
    ids: list[int]  # the added token first


class PrefixProof:
    """``encode`` makes ``tokenizers.Encoding`` of texts, without special tokens."""

    def __init__(self, backend: Any, encode: Callable[[Sequence[str]], list[Any]]) -> None:
        self._encode = encode
        # Tokens that take white space beside them, or are looked for in normalised text, do not cut so simply.
        self._cutters = {
            added.content: number
            for number, added in backend.get_added_tokens_decoder().items()
            if not (added.normalized or added.lstrip or added.rstrip or added.single_word)
        }
        self._endings: dict[str, _Ending] = {}
        self._latest: _Ending | None = None

    def lengths(self, prompts: Sequence[tuple[str, Any]]) -> list[int | None]:
        """Tokens of each prompt; None where they are not the first tokens of its whole text, whose encoding stands
        beside it."""
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

    def _by_ending(self, prompt: str, whole: Any) -> int | None:
        """None: not proven in this way."""
        ending = self._ending_of(prompt)
        if ending is None:
            return None
        at = len(prompt) - len(ending.text)
        cut: int | None = whole.char_to_token(at)
        if cut is None or whole.token_to_chars(cut)[0] != at:
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
