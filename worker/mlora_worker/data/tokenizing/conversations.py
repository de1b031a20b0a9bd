"""Chats, rendered with a chat template, and their answers found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from mlora_worker.data.reading.row_bounds import MOST_TEXT, too_much_text
from mlora_worker.data.reading.row_types import ASSISTANT, Chat, Drop, Turn
from mlora_worker.data.tokenizing import turn_ends as closings
from mlora_worker.data.tokenizing.answer_spans import AnswerProof, AnswerSpan, Mismatch, Proven, Steps
from mlora_worker.data.tokenizing.chunks import batches
from mlora_worker.data.tokenizing.rendering import Asked, ChatTemplate, ConversationRejected, Tools
from mlora_worker.data.tokenizing.special_text import Masked, SpecialText
from mlora_worker.data.tokenizing.tool_text import leaves_out
from mlora_worker.data.tokenizing.turn_ends import AddedTokens, Form
from mlora_worker.protocol import FailureReason, TrainOn

# Of one conversation. The work on it grows with its length, but it is held in memory as a whole, with its renderings.
MOST_TURNS, MOST_CHARACTERS = 20_000, 2_000_000

_LEFT_OUT = {Mismatch.CALLS: Drop.TOOL_CALLS, Mismatch.THOUGHTS: Drop.REASONING}

_TOGETHER = 64  # rows that are rendered in one go: a task's own template has them sent to its process
_CHARACTERS_TOGETHER = 1_000_000


class Rendered(NamedTuple):
    line: int
    text: str
    answers: tuple[AnswerSpan, ...]  # that are supervised; none: the whole text is
    closed: bool  # the template begins and ends it; else the tokenizer's own tokens do
    weight: float = 1.0
    special: bool = False  # the row's own text has special tokens in it
    stood_in: str | None = None  # the text for a tokenizer that takes those for text


class RowRejected(Exception):
    """``str(error)`` says of the row at ``line`` why it fails the task."""

    def __init__(self, line: int, message: str, reason: FailureReason = FailureReason.INVALID_ROW) -> None:
        super().__init__(message)
        self.line = line
        self.reason = reason


_Steps = Generator[list[Asked], list[str | ConversationRejected], Rendered | Drop]


class Conversations:
    """Of one template and its tokenizer, for one thread."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Any,
        train_on: TrainOn,
        mismatches: Counter[Mismatch],
        most_text: int = MOST_TEXT,
    ) -> None:
        """``mismatches``: counts why rows are dropped as TemplateMismatch. ``most_text``: bytes of one conversation."""
        self._most_text = most_text
        self._template = template
        self._train_on = train_on
        self._backend = tokenizer.backend_tokenizer
        self._added = AddedTokens(tokenizer.get_added_vocab(), tokenizer.eos_token, tokenizer.bos_token)
        self._form: Form | None = None
        self._proof: AnswerProof | None = None  # made with the first chat
        self._ends: tuple[str, ...] = (tokenizer.eos_token,) if tokenizer.eos_token else ()
        self.special = SpecialText(self._backend)
        self._mismatches = mismatches

    def render(self, chats: Sequence[Chat]) -> list[Rendered | Drop]:
        """Raises RowRejected: the first of those that the template refuses, or that are too long."""
        return [made for some in _some(chats) for made in self._together(some)]

    def _together(self, chats: Sequence[Chat]) -> list[Rendered | Drop]:
        proof = self._proof or self._learn()
        steps = [self._steps(chat, proof) for chat in chats]
        made: dict[int, Rendered | Drop] = {}
        refused: dict[int, RowRejected] = {}
        waiting: list[tuple[int, list[str | ConversationRejected] | None]] = [
            (place, None) for place in range(len(chats))
        ]
        while waiting:
            asked: list[tuple[int, list[Asked]]] = []
            for place, given in waiting:
                try:
                    # None begins it.
                    asked.append((place, steps[place].send(given)))  # type: ignore[arg-type]
                except StopIteration as done:
                    made[place] = done.value
                except RowRejected as error:
                    refused[place] = error
                except ConversationRejected as error:
                    message = f"was rejected by the chat template: {error}"
                    refused[place] = RowRejected(chats[place].line, message)
            texts = iter(self._template.render_all([one for _, each in asked for one in each]))
            waiting = [(place, list(islice(texts, len(each)))) for place, each in asked]
        if refused:
            raise refused[min(refused)]
        return [made[place] for place in range(len(chats))]

    def _learn(self) -> AnswerProof:
        prompt, bare, answered, longer = self._template.render_all(
            [(turns, with_prompt, ()) for turns, with_prompt in closings.form_questions()]
        )
        if isinstance(prompt, str) and isinstance(bare, str) and isinstance(answered, str):
            more = longer if isinstance(longer, str) else None
            self._form = closings.form_of(prompt, bare, answered, more, self._added)
        if self._form is not None:
            self._ends = self._form.ends
            self.special = SpecialText(self._backend, self._form.tokens)
        self._proof = AnswerProof(self._added, self._form)
        return self._proof

    def _steps(self, chat: Chat, proof: AnswerProof) -> _Steps:
        _check_size(chat, self._most_text)
        turns: list[Turn] = []
        for turn in chat.turns:
            if turn.role == ASSISTANT:
                answer = closings.without_end(turn.content, self._ends)
                if not answer.strip() and not turn.calls:
                    return Drop.NO_ANSWER
                if answer is not turn.content:
                    turn = turn._replace(content=answer)
            if self._form is not None and closings.looks_rendered(turn, self._form, self._added):
                return Drop.ALREADY_RENDERED
            turns.append(turn)
        masked: Masked | None = None
        if self.special.within_row(turns, chat.tools):
            masked = self.special.masked(turns, chat.tools)
            if masked is None:
                return self._mismatch(Mismatch.SPECIAL)
            shown, hidden = yield [(turns, False, chat.tools), (masked.turns, False, masked.tools)]
            if isinstance(shown, ConversationRejected):
                raise shown
            if isinstance(hidden, ConversationRejected) or masked.unmasked(hidden) != shown:
                return self._mismatch(Mismatch.SPECIAL)
        asked, tools = (masked.turns, masked.tools) if masked is not None else (turns, chat.tools)
        proven = yield from _with_tools(proof.steps(asked, self._answered(turns)), tools)
        if isinstance(proven, Mismatch):
            return _LEFT_OUT.get(proven) or self._mismatch(proven)
        if leaves_out(asked, tools, proven.text):
            return Drop.TOOL_CALLS
        if masked is None:
            return Rendered(chat.line, proven.text, proven.answers, True, chat.weight)
        stood_in = self.special.stood_in(proven.text, masked.masks)
        text = masked.unmasked(proven.text)
        return Rendered(chat.line, text, proven.answers, True, chat.weight, True, stood_in)

    def _mismatch(self, why: Mismatch) -> Drop:
        self._mismatches[why] += 1
        return Drop.TEMPLATE_MISMATCH

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


def _with_tools(
    steps: Steps, tools: Tools
) -> Generator[list[Asked], list[str | ConversationRejected], Proven | Mismatch]:
    """``steps``, each of whose renderings has the definitions of ``tools``."""
    given: list[str | ConversationRejected] | None = None
    while True:
        try:
            # None begins it.
            asked = steps.send(given)  # type: ignore[arg-type]
        except StopIteration as done:
            proven: Proven | Mismatch = done.value
            return proven
        given = yield [(turns, prompt, tools) for turns, prompt in asked]


def _check_size(chat: Chat, most_text: int) -> None:
    message = None
    if len(chat.turns) > MOST_TURNS:
        message = f"has {len(chat.turns):,} turns; a conversation may have {MOST_TURNS:,}"
    elif (characters := _characters_of(chat)) > MOST_CHARACTERS:
        message = f"has {characters:,} characters; a conversation may have {MOST_CHARACTERS:,}"
    flaw = too_much_text(chat.texts, most_text) if message is None else None
    if flaw is not None:
        raise RowRejected(chat.line, flaw)
    if message is not None:
        raise RowRejected(chat.line, f"{message}: split it into several rows")


def _characters_of(chat: Chat) -> int:
    return sum(map(len, chat.texts))


def _some(chats: Sequence[Chat]) -> Iterator[list[Chat]]:
    return batches(chats, most=_TOGETHER, size=_characters_of, most_size=_CHARACTERS_TOGETHER)
