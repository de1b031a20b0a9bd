"""Chats to tokens. Which tokens are supervised is proven by rendering; where it cannot be proven the row is
refused.

For the assistant turn j of a chat, with the tokenizer's own chat template:
1. ``prompt``  = turns before j, rendered with the generation prompt: what a server sends before the model
answers. 2. ``through`` = turns up to j, rendered. It must start with ``prompt`` and contain the answer. 3.
``tail``    = what the template writes after the answer, found by rendering a placeholder in the answer's
place. The turn ends with the first of the tokenizer's own added tokens in it (``<|im_end|>``,
``<end_of_turn>``, ``</s>``); a template that closes turns with plain text is taken at its word, but for
trailing white space. An empty tail would teach the model never to stop. 4. The whole chat's rendering must
start with ``through`` as far as the turn's end, and the whole chat's tokens with the tokens of ``prompt``.
Supervised are the tokens after those, up to the turn's end. No token is ever judged by its id: whether pad,
eos and the turn's end are one token or three makes no difference.

A tokenizer without a chat template takes prompt + completion as they are, with the tokenizer's own beginning
and its end-of-sequence token, by the same proof.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2.exceptions import TemplateError

from mlora_worker.data.errors import DataError
from mlora_worker.data.formats import ASSISTANT, Chat, Drop, Turn
from mlora_worker.protocol import FailureReason

_PLACEHOLDER = "Qx7placeholderK"
_CHARACTERS_AT_ONCE = 2_000_000

# Each call sets padding and truncation on the tokenizer, which fails while another thread encodes
# (huggingface/transformers#47085). It uses all cores by itself, so one at a time is no slower.
_TOKENIZING = threading.Lock()


@dataclass(frozen=True, eq=False)
class Encoded:
    """A whole chat. ``supervised[i]`` says whether token i is one that the model shall learn to write."""

    ids: npt.NDArray[np.int32]  # [tokens]
    supervised: npt.NDArray[np.bool_]  # [tokens]


class _Answer(NamedTuple):
    """One answer within a rendered text: after ``prompt``, to the character ``end``."""

    prompt: str
    end: int


class _Rendered(NamedTuple):
    text: str
    answers: tuple[_Answer, ...]


class _Closing(NamedTuple):
    """What a template writes around an answer. The model writes ``lead`` too; of ``tail``, the first ``stop``
    characters.
    """

    lead: str
    tail: str
    stop: int


class ChatEncoder:
    """Encodes chats with one tokenizer (a fast one). An encoder is for one thread, its tokenizer may be shared."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Nearly every row has the same closing: it is probed once and verified for each.
        self._closing: _Closing | None = None
        self.has_template = bool(tokenizer.chat_template)
        self._added = sorted(filter(str.strip, tokenizer.get_added_vocab()), key=len, reverse=True)
        if not self.has_template:
            self._bos = self._ids_before_text()
            if tokenizer.eos_token_id is None:
                raise DataError(
                    FailureReason.INVALID_SPEC,
                    "the base model's tokenizer has neither a chat template nor an end-of-sequence token, so "
                    "the adapter could never learn to stop; add one of them to the model's folder",
                )

    def encode(self, chats: Sequence[Chat]) -> list[Encoded | Drop]:
        """One result per chat. Raises DataError (InvalidRow) for a chat that the template itself refuses."""
        results: list[_Rendered | Encoded | Drop] = [self._render(chat) for chat in chats]
        rendered = [(place, row) for place, row in enumerate(results) if isinstance(row, _Rendered)]
        whole = self._encodings([row.text for _, row in rendered])
        # Prompts are compared and forgotten a few at a time: those of one long chat are together far longer
        # than it is.
        proven = iter(
            self._lengths(
                [
                    (answer.prompt, one.ids)
                    for (_, row), one in zip(rendered, whole, strict=True)
                    for answer in row.answers
                ]
            )
        )
        for (place, row), one in zip(rendered, whole, strict=True):
            results[place] = self._supervise(row, one, [next(proven) for _ in row.answers])
        return [row for row in results if not isinstance(row, _Rendered)]

    def _encodings(self, texts: list[str]) -> list[Any]:
        if not texts:
            return []
        with _TOKENIZING:
            return list(self._tokenizer(texts, add_special_tokens=False, verbose=False).encodings)

    def _lengths(self, prompts: Sequence[tuple[str, list[int]]]) -> Iterator[int | None]:
        """Tokens of each prompt; None where they are not the first tokens of its whole text's ``ids``."""
        start = 0
        while start < len(prompts):
            stop, characters = start, 0
            while stop < len(prompts) and characters < _CHARACTERS_AT_ONCE:
                characters += len(prompts[stop][0])
                stop += 1
            batch = prompts[start:stop]
            for (_, ids), one in zip(batch, self._encodings([prompt for prompt, _ in batch]), strict=True):
                yield len(one.ids) if ids[: len(one.ids)] == one.ids else None
            start = stop

    def _supervise(self, row: _Rendered, whole: Any, starts: Sequence[int | None]) -> Encoded | Drop:
        """``whole`` is the text's encoding. Each answer begins at the token in ``starts``; None: unproven."""
        ids: list[int] = whole.ids
        supervised = np.zeros(len(ids), np.bool_)
        for answer, start in zip(row.answers, starts, strict=True):
            last = whole.char_to_token(answer.end - 1)
            after = whole.char_to_token(answer.end) if answer.end < len(row.text) else None
            if start is None or last is None or last < start or last == after:
                return Drop.TEMPLATE_MISMATCH
            supervised[start : last + 1] = True
        if self.has_template:
            return Encoded(np.array(ids, np.int32), supervised)
        # The answer of a plain row is always its end.
        bos = [] if ids[: len(self._bos)] == self._bos else self._bos
        return Encoded(
            np.array([*bos, *ids, self._tokenizer.eos_token_id], np.int32),
            np.concatenate([np.zeros(len(bos), np.bool_), supervised, np.ones(1, np.bool_)]),
        )

    def _render(self, chat: Chat) -> _Rendered | Drop:
        if not self.has_template:
            return _plain(chat.turns)
        try:
            return self._prove(chat.turns)
        except TemplateError as error:
            raise DataError(
                FailureReason.INVALID_ROW,
                f"line {chat.line}: the base model's chat template refuses the row: {error}",
            ) from None

    def _prove(self, turns: tuple[Turn, ...]) -> _Rendered | Drop:
        text = self._apply(turns)
        answers: list[_Answer] = []
        for place, turn in enumerate(turns):
            if turn.role != ASSISTANT:
                continue
            if place == 0:  # no template renders a prompt of nothing
                return Drop.TEMPLATE_MISMATCH
            prompt = self._apply(turns[:place], add_generation_prompt=True)
            through = text if place == len(turns) - 1 else self._apply(turns[: place + 1])
            if not through.startswith(prompt):
                return Drop.TEMPLATE_MISMATCH
            closing = self._closing_of(turns[:place], prompt, through, turn.content)
            if closing is None:
                return Drop.TEMPLATE_MISMATCH
            end = len(through) - len(closing.tail) + closing.stop
            if not text.startswith(through[:end]):
                return Drop.TEMPLATE_MISMATCH
            answers.append(_Answer(prompt, end))
        return _Rendered(text, tuple(answers))

    def _closing_of(self, before: Sequence[Turn], prompt: str, through: str, content: str) -> _Closing | None:
        known = self._closing
        if known is not None:
            middle = through[len(prompt) + len(known.lead) : len(through) - len(known.tail)]
            if through == prompt + known.lead + middle + known.tail and middle.strip() == content.strip():
                return known
        probe = self._apply([*before, Turn(ASSISTANT, _PLACEHOLDER)])
        lead, found, tail = probe.removeprefix(prompt).partition(_PLACEHOLDER)
        stop = self._stop_of(tail)
        answer = through[len(prompt) : len(through) - len(tail)]
        if not found or not stop or not through.endswith(tail) or content.strip() not in answer:
            return None
        self._closing = _Closing(lead, tail, stop)
        return self._closing

    def _stop_of(self, tail: str) -> int:
        """Characters of ``tail`` up to the end of the turn; 0 when nothing ends it."""
        places = [(at, name) for name in self._added if (at := tail.find(name)) >= 0]
        if places:
            at, name = min(places, key=lambda place: place[0])  # the longest name comes first at equal places
            return at + len(name)
        return len(tail.rstrip()) or len(tail)

    def _apply(self, turns: Sequence[Turn], *, add_generation_prompt: bool = False) -> str:
        messages = [turn._asdict() for turn in turns]
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def _ids_before_text(self) -> list[int]:
        """What the tokenizer puts before a text of its own accord: its bos token, or nothing."""
        with _TOKENIZING:
            bare = self._tokenizer("x", add_special_tokens=False).input_ids
            full = self._tokenizer("x").input_ids
        starts = (at for at in range(len(full)) if full[at : at + len(bare)] == bare)
        return list(full[: next(starts, 0)])


def _plain(turns: Sequence[Turn]) -> _Rendered:
    """A prompt and its completion, without a template."""
    prompt, completion = (turn.content for turn in turns)
    text = prompt + completion
    return _Rendered(text, (_Answer(prompt, len(text)),))
