"""Chats to tokens. Which tokens are supervised is proven; where it cannot be proven the row is refused.

1. A chat is rendered, and ``proof`` finds by renderings which characters are its answers, each with what closes its turn
(``closing``). 2. The text is tokenised, and ``cuts`` finds which tokens these are. No token is ever judged by its id:
whether pad, eos and the turn's end are one token or three makes no difference.

Special tokens in a turn's own text are text (``special_text``). An answer that ends in what closes its turn has that once.

With ``lastAnswer`` only the last assistant turn is supervised and has to be proven, so that a template which shows
earlier answers differently will do. With ``everything`` the same is proven, and all tokens up to that turn's end are
supervised.

A tokenizer without a chat template takes prompt + completion as they are, with the tokenizer's own beginning and its
end-of-sequence token, by the same proof. A text is taken so by every tokenizer. No template writes special tokens there, so
those in the row's own text are meant, and are tokens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading.row_bounds import MOST_TEXT, too_much_text
from mlora_worker.data.reading.row_types import Chat, Drop, PlainText
from mlora_worker.data.tokenizing.answer_spans import AnswerSpan, Mismatch
from mlora_worker.data.tokenizing.answer_tokens import Cut, Cuts, LabelledRow
from mlora_worker.data.tokenizing.conversations import Conversations, Rendered, RowRejected
from mlora_worker.data.tokenizing.prefix_tokens import SharedBeginning, cutters_of
from mlora_worker.data.tokenizing.rendering import ChatTemplate
from mlora_worker.data.tokenizing.special_text import SpecialText
from mlora_worker.data.tokenizing.text_tokens import Coded, Tokens
from mlora_worker.data.tokenizing.turn_ends import without_end
from mlora_worker.protocol import FailureReason, TrainOn

__all__ = ["ChatEncoder", "Encoded", "Rendered", "RowRejected"]

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
    special: bool = False  # its own text has special tokens in it


class ChatEncoder:
    """Encodes rows with one tokenizer (a fast one). An encoder is for one thread, its tokenizer may be shared.

    ``template``: the task's own, in the place of the tokenizer's; ``templated`` False: no template is needed, and the
    tokenizer's is not looked at. Raises InvalidTemplate for one that is none. An encoder with a task's own template has a
    process, which ``close`` ends. ``day``: see ``ChatTemplate``. ``most_text``: bytes of the texts of one row.
    """

    def __init__(
        self,
        tokenizer: Any,
        train_on: TrainOn = TrainOn.ALL_ANSWERS,
        template: str | None = None,
        *,
        templated: bool = True,
        day: date | None = None,
        most_text: int = MOST_TEXT,
    ) -> None:
        self._most_text = most_text
        self._backend = tokenizer.backend_tokenizer
        self._eos: int | None = tokenizer.eos_token_id
        self._ends = (tokenizer.eos_token,) if tokenizer.eos_token else ()
        self.bos: int | None = tokenizer.bos_token_id
        self._train_on = train_on
        self._encode = self._encodings  # one object: what is encoded in the same way is encoded together
        self._cuts = Cuts(self._backend, self._encode)
        self._beginning = SharedBeginning(cutters_of(self._backend), self._encode)
        self._special = SpecialText(self._backend)
        self._mismatches: Counter[Mismatch] = Counter()
        self._before_text = self._ids_before_text()
        # Last, so that no process is left where something else fails.
        has_one = template is not None or (templated and tokenizer.chat_template)
        self._template = ChatTemplate(tokenizer, template, day=day) if has_one else None
        self._conversations = (
            Conversations(self._template, tokenizer, train_on, self._mismatches, most_text)
            if self._template is not None
            else None
        )
        if not self.has_template:
            self.check_plain()

    def token(self, number: int) -> str | None:
        """Its text in the vocabulary."""
        found: str | None = self._backend.id_to_token(number)
        return found

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def why_mismatched(self) -> Mismatch | None:
        """Of most rows that were dropped as TemplateMismatch."""
        return self._mismatches.most_common(1)[0][0] if self._mismatches else None

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
                f"the base model's tokenizer has {lacks}, so the adapter could never learn to stop: add one to the "
                f"model's folder",
            )

    def encode(self, rows: Sequence[Chat | PlainText]) -> list[Encoded | Drop]:
        """One result per row. Raises RowRejected for a chat that the template itself refuses."""
        rendered = self.render(rows)
        return self.supervise(rendered, self.tokenise(rendered))

    def render(self, rows: Sequence[Chat | PlainText]) -> list[Rendered | Drop]:
        """The first of three steps, see ``encode``."""
        conversations = self._conversations
        if conversations is None:
            return [self._plain(row) for row in rows]
        chats = iter(conversations.render([row for row in rows if isinstance(row, Chat) and not row.plain]))
        return [self._plain(row) if isinstance(row, PlainText) or row.plain else next(chats) for row in rows]

    def tokenise(self, rendered: Sequence[Rendered | Drop]) -> list[Tokens | None]:
        """Of what was not dropped; None where that cannot be done. Most of the work, without the interpreter's lock."""
        rows = [row for row in rendered if isinstance(row, Rendered)]
        usual = iter(self._beginning.tokens([row.text for row in rows if row.stood_in is None]))
        special = iter(self._as_text([row.stood_in for row in rows if row.stood_in is not None]))
        return [next(usual) if row.stood_in is None else next(special) for row in rows]

    def supervise(
        self, rendered: Sequence[Rendered | Drop], tokens: Sequence[Tokens | None]
    ) -> list[Encoded | Drop]:
        kept = [row for row in rendered if isinstance(row, Rendered)]
        asked = [
            LabelledRow(row.text, row.answers, one, self._encode)
            if row.stood_in is None
            else LabelledRow(row.stood_in, row.answers, one, self._special_encode)
            for row, one in zip(kept, tokens, strict=True)
            if one is not None
        ]
        cuts = iter(self._cuts.of(asked))
        found = iter([None if one is None else next(cuts) for one in tokens])
        return [row if isinstance(row, Drop) else self._supervise(row, next(found)) for row in rendered]

    def _encodings(self, texts: Sequence[str]) -> list[Coded]:
        if not texts:
            return []
        with _TOKENIZING:
            if self._backend.truncation is not None:
                self._backend.no_truncation()
            if self._backend.padding is not None:
                self._backend.no_padding()
            made = self._backend.encode_batch(texts, add_special_tokens=False)
        return [Coded(one.ids, one) for one in made]

    def _as_text(self, texts: Sequence[str]) -> list[Tokens | None]:
        if self._conversations is None or not texts:
            return []
        special = self._conversations.special
        return [Tokens(*one) if special.is_text(one) else None for one in special.encodings(texts)]

    def _special_encode(self, texts: Sequence[str]) -> list[Coded]:
        return self._conversations.special.encodings(texts) if self._conversations is not None else []

    def _supervise(self, row: Rendered, cut: Cut | None) -> Encoded | Drop:
        if cut is None:
            self._mismatches[Mismatch.TOKENS] += 1
            return Drop.TEMPLATE_MISMATCH
        ids = np.array(cut.ids, np.int32)
        supervised = np.full(len(ids), not row.answers, np.bool_)
        for first, after in cut.answers:
            supervised[0 if self._train_on is TrainOn.EVERYTHING else first : after] = True
        if row.closed:
            return Encoded(row.line, ids, supervised, row.weight, row.special)
        # The answer of a plain row is always its end. What the tokenizer puts in front is nobody's to learn.
        bos = np.array(
            [] if ids[: len(self._before_text)].tolist() == self._before_text else self._before_text, np.int32
        )
        return Encoded(
            row.line,
            np.concatenate([bos, ids, np.array([self._eos], np.int32)]),
            np.concatenate([np.zeros(len(bos), np.bool_), supervised, np.ones(1, np.bool_)]),
            row.weight,
            row.special,
        )

    def _plain(self, row: Chat | PlainText) -> Rendered | Drop:
        """A text, or a prompt and its completion, without a template. What ends it is written behind it, once."""
        whole = [row.text] if isinstance(row, PlainText) else [turn.content for turn in row.turns]
        flaw = too_much_text(whole, self._most_text)
        if flaw is not None:
            raise RowRejected(row.line, flaw)
        self.check_plain()
        if isinstance(row, PlainText):
            text = without_end(row.text, self._ends)
            if not text.strip():
                return Drop.EMPTY_TEXT
            return Rendered(row.line, text, (), False, row.weight, self._special.within(text))
        if row.plain is False:
            raise RowRejected(
                row.line, "has turns, and the base model's tokenizer has no chat template: make prompt and answers texts, "
                "or give the task a template (dataset.chatTemplate)", FailureReason.INVALID_SPEC,
            )  # fmt: skip
        prompt, completion = (turn.content for turn in row.turns)
        completion = without_end(completion, self._ends)
        if not completion.strip():
            return Drop.NO_ANSWER
        text = prompt + completion
        answers = (AnswerSpan(len(prompt), len(text)),)
        return Rendered(row.line, text, answers, False, row.weight, self._special.within(text))

    def _ids_before_text(self) -> list[int]:
        """What the tokenizer puts before a text of its own accord: its bos token, or nothing."""
        ((bare, _),) = self._encodings(["x"])
        with _TOKENIZING:
            full: list[int] = self._backend.encode("x").ids
        starts = (at for at in range(len(full)) if full[at : at + len(bare)] == bare)
        return full[: next(starts, 0)]
