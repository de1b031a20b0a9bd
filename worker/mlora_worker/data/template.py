"""Chats to tokens. Which tokens are supervised is proven by rendering; where it cannot be proven the row is
refused.

For the assistant turn j of a chat, with the chat template:
1. ``prompt``  = turns before j, rendered with the generation prompt: what a server sends before the model
answers. 2. ``through`` = turns up to j, rendered. It must start with ``prompt`` and contain the answer. 3.
``tail``    = what the template writes after the answer, found by rendering a placeholder in the answer's
place. The turn ends with the first of the tokenizer's own added tokens in it (``<|im_end|>``,
``<end_of_turn>``, ``</s>``); a template that closes turns with plain text is taken at its word, but for
trailing white space. An empty tail would teach the model never to stop. 4. The whole chat's rendering must
start with ``through`` as far as the turn's end, and the whole chat's tokens with the tokens of ``prompt``.
Supervised are the tokens after those, up to the turn's end. No token is ever judged by its id: whether pad,
eos and the turn's end are one token or three makes no difference.

With ``lastAnswer`` only the last assistant turn is supervised and has to be proven, so that a template which shows
earlier answers differently will do. With ``everything`` the same is proven, and all tokens up to that turn's end are
supervised.

A tokenizer without a chat template takes prompt + completion as they are, with the tokenizer's own beginning
and its end-of-sequence token, by the same proof. A text is taken so by every tokenizer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlora_worker.data.errors import DataError
from mlora_worker.data.prefix import PrefixProof, SharedBeginning, Tokens, cutters_of
from mlora_worker.data.rendering import ChatTemplate, Refused
from mlora_worker.data.rows import ASSISTANT, Chat, Drop, Text, Turn
from mlora_worker.protocol import FailureReason, TrainOn

_PLACEHOLDER = "Qx7placeholderK"
_TOGETHER = 64  # rows that are rendered in one go: a task's own template has them sent to its process

# The tokenizer's own settings may not change while a thread encodes (huggingface/transformers#47085). It uses all
# cores by itself, so one at a time is no slower.
_TOKENIZING = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A whole row, that of ``line``. ``supervised[i]`` says whether token i is one that the model shall learn to write."""

    line: int
    ids: npt.NDArray[np.int32]  # [tokens]
    supervised: npt.NDArray[np.bool_]  # [tokens]
    weight: float = 1.0


class Answer(NamedTuple):
    """One answer within a rendered text: after ``prompt``, to the character ``end``."""

    prompt: str
    end: int


class Rendered(NamedTuple):
    line: int
    text: str
    answers: tuple[Answer, ...]  # that are supervised; none: the whole text is
    closed: bool  # the template begins and ends it; else the tokenizer's own tokens do
    weight: float = 1.0


class _Closing(NamedTuple):
    """What a template writes around an answer. The model writes ``lead`` too; of ``tail``, the first ``stop``
    characters.
    """

    lead: str
    tail: str
    stop: int


class RowRefused(Exception):
    """``str(error)`` says of the row at ``line`` why it fails the task."""

    def __init__(self, line: int, told: str, reason: FailureReason = FailureReason.INVALID_ROW) -> None:
        super().__init__(told)
        self.line = line
        self.reason = reason


class ChatEncoder:
    """Encodes rows with one tokenizer (a fast one). An encoder is for one thread, its tokenizer may be shared.

    ``template``: the task's own, in the place of the tokenizer's. Raises InvalidTemplate for one that is none. An encoder
    with such a template has a process, which ``close`` ends. ``day``: see ``ChatTemplate``.
    """

    def __init__(
        self,
        tokenizer: Any,
        train_on: TrainOn = TrainOn.ALL_ANSWERS,
        template: str | None = None,
        *,
        day: date | None = None,
    ) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._eos = tokenizer.eos_token_id
        self.bos: int | None = tokenizer.bos_token_id
        self._train_on = train_on
        cutters = cutters_of(self._backend)
        self._prefixes = PrefixProof(cutters, self._encodings)
        self._beginning = SharedBeginning(cutters, self._encodings)
        # Nearly every row has the same closing: it is probed once and verified for each.
        self._closing: _Closing | None = None
        self._added = sorted(filter(str.strip, tokenizer.get_added_vocab()), key=len, reverse=True)
        self._before_text = self._ids_before_text()
        # Last, so that no process is left where something else fails.
        has_one = template is not None or tokenizer.chat_template
        self._template = ChatTemplate(tokenizer, template, day=day) if has_one else None
        if not self.has_template:
            self.check_plain()

    def token(self, number: int) -> str | None:
        """Its text in the vocabulary."""
        found: str | None = self._backend.id_to_token(number)
        return found

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def close(self) -> None:
        if self._template is not None:
            self._template.close()

    def check_plain(self) -> None:
        """Raises DataError (InvalidSpec) where rows without a template could never teach the model to stop."""
        if self._eos is None:
            lacks = (
                "no end-of-sequence token"
                if self.has_template
                else ("neither a chat template nor an end-of-sequence token")
            )
            raise DataError(
                FailureReason.INVALID_SPEC,
                f"the base model's tokenizer has {lacks}, so the adapter could never learn to stop; add one to the "
                "model's folder",
            )

    def encode(self, rows: Sequence[Chat | Text]) -> list[Encoded | Drop]:
        """One result per row. Raises RowRefused for a chat that the template itself refuses."""
        rendered = self.render(rows)
        return self.supervise(rendered, self.tokenise(rendered))

    def render(self, rows: Sequence[Chat | Text]) -> list[Rendered | Drop]:
        """The first of three steps, see ``encode``."""
        template = self._template
        if template is None:
            return [self._plain(row) for row in rows]
        made: list[Rendered | Drop] = []
        for start in range(0, len(rows), _TOGETHER):
            some = rows[start : start + _TOGETHER]
            asked = [[] if isinstance(row, Text) else self._renderings_of(row) for row in some]
            answers = iter(template.render_all([one for each in asked for one in each]))
            for row, each in zip(some, asked, strict=True):
                texts = [next(answers) for _ in each]
                made.append(self._plain(row) if isinstance(row, Text) else self._prove(row, template, texts))
        return made

    def tokenise(self, rendered: Sequence[Rendered | Drop]) -> list[Tokens]:
        """Of what was not dropped. Most of the work, without the interpreter's lock."""
        texts = [row.text for row in rendered if isinstance(row, Rendered)]
        return self._beginning.tokens(texts) if texts else []

    def supervise(
        self, rendered: Sequence[Rendered | Drop], tokens: Sequence[Tokens]
    ) -> list[Encoded | Drop]:
        kept = [row for row in rendered if isinstance(row, Rendered)]
        asked = [
            (answer.prompt, one) for row, one in zip(kept, tokens, strict=True) for answer in row.answers
        ]
        starts = iter(self._prefixes.lengths(asked))
        whole = iter(tokens)
        return [
            row
            if isinstance(row, Drop)
            else self._supervise(row, next(whole), [next(starts) for _ in row.answers])
            for row in rendered
        ]

    def _encodings(self, texts: Sequence[str]) -> list[Any]:
        if not texts:
            return []
        with _TOKENIZING:
            if self._backend.truncation is not None:
                self._backend.no_truncation()
            if self._backend.padding is not None:
                self._backend.no_padding()
            return list(self._backend.encode_batch(texts, add_special_tokens=False))

    def _supervise(self, row: Rendered, whole: Tokens, starts: Sequence[int | None]) -> Encoded | Drop:
        """``whole`` are the text's tokens. Each answer begins at the token in ``starts``; None: unproven."""
        ids = np.array(whole.ids, np.int32)
        supervised = np.full(len(ids), not row.answers, np.bool_)
        for answer, start in zip(row.answers, starts, strict=True):
            last = whole.at(answer.end - 1)
            after = whole.at(answer.end) if answer.end < len(row.text) else None
            if start is None or last is None or last < start or last == after:
                return Drop.TEMPLATE_MISMATCH
            supervised[start : last + 1] = True
            if self._train_on is TrainOn.EVERYTHING:
                supervised[: last + 1] = True
        if row.closed:
            return Encoded(row.line, ids, supervised, row.weight)
        # The answer of a plain row is always its end. What the tokenizer puts in front is nobody's to learn.
        bos = np.array(
            [] if ids[: len(self._before_text)].tolist() == self._before_text else self._before_text, np.int32
        )
        return Encoded(
            row.line,
            np.concatenate([bos, ids, np.array([self._eos], np.int32)]),
            np.concatenate([np.zeros(len(bos), np.bool_), supervised, np.ones(1, np.bool_)]),
            row.weight,
        )

    def _answered(self, turns: Sequence[Turn]) -> list[int]:
        """Places of the answers that are to be proven."""
        last = len(turns) - 1
        return [
            place
            for place, turn in enumerate(turns)
            if turn.role == ASSISTANT
            and turn.learnt
            and (place == last or self._train_on is TrainOn.ALL_ANSWERS)
        ]

    def _renderings_of(self, chat: Chat) -> list[tuple[Sequence[Turn], bool]]:
        """What ``_prove`` needs: the whole, then of each answer its prompt, and the chat through it."""
        turns = chat.turns
        asked: list[tuple[Sequence[Turn], bool]] = [(turns, False)]
        for place in self._answered(turns):
            if place == 0:  # no template renders a prompt of nothing
                break
            asked.append((turns[:place], True))
            if place < len(turns) - 1:
                asked.append((turns[: place + 1], False))
        return asked

    def _prove(self, chat: Chat, template: ChatTemplate, texts: Sequence[str | Refused]) -> Rendered | Drop:
        turns = chat.turns
        left = iter(texts)

        def rendered() -> str:
            text = next(left)
            if isinstance(text, Refused):
                raise RowRefused(chat.line, f"is refused by the chat template: {text}")
            return text

        text = rendered()
        answers: list[Answer] = []
        for place in self._answered(turns):
            if place == 0:
                return Drop.TEMPLATE_MISMATCH
            prompt = rendered()
            through = text if place == len(turns) - 1 else rendered()
            answer = self._answer(template, turns[: place + 1], prompt, through, text)
            if answer is None:
                return Drop.TEMPLATE_MISMATCH
            answers.append(answer)
        return Rendered(chat.line, text, tuple(answers), True, chat.weight)

    def _answer(
        self, template: ChatTemplate, turns: Sequence[Turn], prompt: str, through: str, text: str
    ) -> Answer | None:
        """Of the last of ``turns``; None when it cannot be proven."""
        if not through.startswith(prompt):
            return None
        closing = self._closing_of(template, turns[:-1], prompt, through, turns[-1].content)
        if closing is None:
            return None
        end = len(through) - len(closing.tail) + closing.stop
        return Answer(prompt, end) if text.startswith(through[:end]) else None

    def _closing_of(
        self, template: ChatTemplate, before: Sequence[Turn], prompt: str, through: str, content: str
    ) -> _Closing | None:
        known = self._closing
        if known is not None and through.endswith(known.tail) and through.startswith(known.lead, len(prompt)):
            middle = through[len(prompt) + len(known.lead) : len(through) - len(known.tail)]
            if middle == content or middle.strip() == content.strip():
                return known
        (probe,) = template.render([[*before, Turn(ASSISTANT, _PLACEHOLDER)]])
        if isinstance(probe, Refused):
            return None
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

    def _plain(self, row: Chat | Text) -> Rendered:
        """A text, or a prompt and its completion, without a template."""
        if isinstance(row, Text):
            return Rendered(row.line, row.text, (), False, row.weight)
        prompt, completion = (turn.content for turn in row.turns)
        text = prompt + completion
        return Rendered(row.line, text, (Answer(prompt, len(text)),), False, row.weight)

    def _ids_before_text(self) -> list[int]:
        """What the tokenizer puts before a text of its own accord: its bos token, or nothing."""
        (bare,) = self._encodings(["x"])
        with _TOKENIZING:
            full: list[int] = self._backend.encode("x").ids
        starts = (at for at in range(len(full)) if full[at : at + len(bare.ids)] == bare.ids)
        return full[: next(starts, 0)]
