"""Special tokens in a user's own text, which are text there.

A tokenizer takes ``<|im_end|>`` for the token wherever it stands. In a conversation, special tokens are the template's:
what a turn's text has of them is tokenised as the characters that it is. Marks of thoughts (``<think>``) in an answer are
the model's own, and stay what they are.

A row that has such text is rendered with a mask in its place, of the same length and of characters for private use, so that
every place in the rendered text is that of the text that a user reads. The special tokens that are left then are the
template's. The tokenizer for such rows is a copy of the model's: it takes no special token for one, and knows stand-ins of
the same length for those of the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from mlora_worker.data.reading.row_types import ASSISTANT, Turn
from mlora_worker.data.reading.tool_turns import texts_in
from mlora_worker.data.tokenizing.text_tokens import Coded
from mlora_worker.data.tokenizing.turn_ends import is_thought_mark

# The last planes of Unicode are for private use. A text that has characters of theirs beside special tokens is refused.
_FIRST_MASK, _FIRST_STAND_IN = 0xF0000, 0x100000
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")


class Masked(NamedTuple):
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...]
    masks: dict[str, str]  # to the texts that they stand for

    def unmasked(self, text: str) -> str:
        for mask, name in self.masks.items():
            text = text.replace(mask, name)
        return text


class SpecialText:
    """Of one tokenizer, and what a template writes of its added tokens."""

    def __init__(self, backend: Any, written: Iterable[str] = ()) -> None:
        self._backend = backend
        added: list[AddedToken] = list(backend.get_added_tokens_decoder().values())
        names = {one.content for one in added if one.special} | {*written}
        known = [one for one in added if one.content in names and one.content.strip()]
        self._known = sorted(known, key=lambda one: len(one.content), reverse=True)
        self._names = [one.content for one in self._known]
        self._masks = {name: chr(_FIRST_MASK + number) * len(name) for number, name in enumerate(self._names)}
        # Most texts have not even the first two characters of one.
        self._beginning = _any_of([*{name[:2]: None for name in self._names}])
        self._pattern = _any_of(self._names)
        self._pattern_in_answers = _any_of([name for name in self._names if not is_thought_mark(name)])
        self._copy: _Copy | None = None

    def within(self, text: str, role: str = "") -> bool:
        return self._beginning.search(text) is not None and self._pattern_of(role).search(text) is not None

    def within_row(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> bool:
        return (
            any(self.within(turn.content, turn.role) for turn in turns)
            or any(self.within(text, turn.role) for turn in turns for text in texts_in(turn.fields))
            or any(map(self.within, texts_in(tools)))
        )

    def masked(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> Masked | None:
        """None where the text has characters that are needed for masks."""
        masks: dict[str, str] = {}

        def mask(found: re.Match[str]) -> str:
            made = self._masks[found[0]]
            masks[made] = found[0]
            return made

        def masked(value: Any, role: str) -> Any:
            if isinstance(value, str):
                return self._pattern_of(role).sub(mask, value)
            if isinstance(value, Mapping):
                return {masked(key, role): masked(one, role) for key, one in value.items()}
            return [masked(one, role) for one in value] if isinstance(value, list | tuple) else value

        texts = (*(turn.content for turn in turns), *texts_in([[turn.fields for turn in turns], tools]))
        if any(map(_PRIVATE.search, texts)):
            return None
        return Masked(
            tuple(
                turn._replace(content=masked(turn.content, turn.role), fields=masked(turn.fields, turn.role))
                for turn in turns
            ),
            tuple(masked(one, "") for one in tools),
            masks,
        )

    def stood_in(self, masked: str, masks: dict[str, str]) -> str:
        """For the copy: with stand-ins for special tokens, and then the text that was masked."""
        text = self._pattern.sub(lambda found: self._stand_in(found[0]), masked)
        for mask, name in masks.items():
            text = text.replace(mask, name)
        return text

    def encodings(self, texts: Sequence[str]) -> list[Coded]:
        """Of texts with stand-ins."""
        if self._copy is None:
            stand_ins = [self._stand_in(name) for name in self._names]
            self._copy = _Copy(self._backend, self._known, stand_ins)
        return self._copy.encodings(texts)

    def is_text(self, coded: Coded) -> bool:
        """Whether no text became a special token all the same, by the tokenizer's vocabulary."""
        return self._copy is None or self._copy.is_text(coded)

    def _pattern_of(self, role: str) -> re.Pattern[str]:
        return self._pattern_in_answers if role == ASSISTANT else self._pattern

    def _stand_in(self, name: str) -> str:
        return chr(ord(self._masks[name][0]) - _FIRST_MASK + _FIRST_STAND_IN) * len(name)


class _Copy:
    """Made when it is first needed: a second, and as much memory as the tokenizer itself."""

    def __init__(self, backend: Any, known: Sequence[AddedToken], stand_ins: Sequence[str]) -> None:
        written: str = backend.to_str()
        if not all(one.special for one in known):
            written = _with_special(written, {one.content for one in known})
        self._tokenizer = Tokenizer.from_str(written)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.add_tokens(
            [
                AddedToken(
                    text,
                    lstrip=one.lstrip,
                    rstrip=one.rstrip,
                    single_word=one.single_word,
                    normalized=False,
                    special=False,
                )
                for one, text in zip(known, stand_ins, strict=True)
            ]
        )
        self._meant = {
            self._tokenizer.token_to_id(text): backend.token_to_id(one.content)
            for one, text in zip(known, stand_ins, strict=True)
        }

    def encodings(self, texts: Sequence[str]) -> list[Coded]:
        made = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [Coded([self._meant.get(token, token) for token in one.ids], one) for one in made]

    def is_text(self, coded: Coded) -> bool:
        return set(self._meant.values()).isdisjoint(coded.places.ids)


def _with_special(written: str, names: set[str]) -> str:
    """A tokenizer's JSON, in which these added tokens are special. The rest, which may be tens of MB, is not parsed."""
    before, key, rest = written.partition('"added_tokens":')
    start = len(rest) - len(rest.lstrip())
    added, end = json.JSONDecoder().raw_decode(rest, start)
    for one in added:
        one["special"] |= one["content"] in names
    return before + key + json.dumps(added) + rest[end:]


def is_stand_in(text: str) -> bool:
    return text >= chr(_FIRST_STAND_IN)


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")
