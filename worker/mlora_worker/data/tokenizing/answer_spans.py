"""Which characters of a rendered conversation are its answers: proven by renderings, or the row is refused.

For the answer j of a chat, with the chat template:

1. ``prompt``  = turns before j, rendered with the generation prompt: what a server sends before the model answers.
2. ``through`` = turns up to j, rendered. It must start with ``prompt`` and have the answer, white space aside, before what
   closes a turn (``closing``, found by rendering a placeholder in the answer's place). What the template writes between the
   prompt and the answer is the model's to write, too.
3. The whole chat's rendering must start with ``through`` as far as the answer's end, and go on with what closes a turn.

An answer with calls of tools, or with thoughts in a field of their own, has no text that could be looked for. What the
template writes between the prompt and the closing is the model's; each part of the answer must be in it (``tool_text``). A
call may be closed by an added token of its own.

Where the generation prompt begins a thought (``<think>``) that the template leaves out of answers, the last answer is the
prompt, what the answer has behind that mark, and the closing: no rendering has to show it.

That is two renderings for each answer. A conversation of more than ``MOST_PROVEN`` answers has so many of them rendered:
the first, the last, and some between. One more rendering with placeholders shows where the others are; what stands around
them must be what stands around those that were rendered. So the work grows with the conversation, not with its square.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from enum import Enum
from typing import NamedTuple, cast

from mlora_worker.data.reading.row_types import ASSISTANT, USER, Turn
from mlora_worker.data.tokenizing import turn_ends as closings
from mlora_worker.data.tokenizing.rendering import ConversationRejected
from mlora_worker.data.tokenizing.tool_text import left_out
from mlora_worker.data.tokenizing.turn_ends import ANSWER, NEXT, AddedTokens, Closing, Form

MOST_PROVEN = 32  # answers of one conversation that are proven by renderings of their own
_AT_BOTH_ENDS = 8  # of these
_RETRIED = 8  # answers that may be rendered because something else stands around them
_CHARACTERS_AT_ONCE = 1_000_000  # of renderings that are held together

Ask = tuple[Sequence[Turn], bool]  # with the generation prompt, or without
Steps = Generator[list[Ask], list[str | ConversationRejected], "Proven | Mismatch"]


class AnswerSpan(NamedTuple):
    """An answer's characters with its lead and its ending."""

    start: int
    end: int


class Proven(NamedTuple):
    text: str
    answers: tuple[AnswerSpan, ...]


class Mismatch(Enum):
    """Why a row cannot be proven; each with what a user can do, where that is all that is wrong."""

    BEGINS = "conversations cannot start with an answer: put a user's turn before it"
    PROMPT = (
        "the chat template does not write the answer directly after its generation prompt: give the task its own "
        "template (dataset.chatTemplate)"
    )
    THOUGHT = (
        "the chat template's generation prompt opens a reasoning block that these answers never close: start each "
        "answer with <think>...</think>, or give the task its own template (dataset.chatTemplate)"
    )
    EARLIER = (
        "the chat template renders earlier answers of a conversation differently from the last one: set "
        "dataset.trainOn to "
        "lastAnswer"
    )
    ENDLESS = (
        "the chat template writes no end token after an answer, so the adapter would never learn to stop: give the "
        "task its own template (dataset.chatTemplate)"
    )
    ALTERED = (
        "the chat template changes the text of the answers: write them as the template does, or set "
        "dataset.chatTemplate"
    )
    CALLS = "the chat template leaves out tool calls"
    THOUGHTS = "the chat template leaves out the thoughts of answers"
    CONTEXT = (
        "the chat template renders earlier tool calls or thoughts differently once an answer follows: remove the thoughts "
        "of earlier turns, or set dataset.chatTemplate"
    )
    WORDS = (
        "the chat template leaves out the words beside a tool call: remove them from these turns, or set "
        "dataset.chatTemplate"
    )
    MANY = (
        f"a conversation with tool calls or reasoning_content may have {MOST_PROVEN} answers that are trained on: split "
        f"it, or set dataset.trainOn to lastAnswer"
    )
    SPECIAL = "texts contain special tokens that the chat template interprets: remove them from the rows"
    TOKENS = "the tokenizer merges the answer and the text next to it into one token"


_OF_ONE_ANSWER = {Mismatch.ENDLESS, Mismatch.CALLS, Mismatch.THOUGHTS, Mismatch.WORDS}


class _Found(NamedTuple):
    """An answer that is the end of ``text``, but for its tail."""

    text: str
    start: int
    stop: int  # where its own text ends, and the closing begins
    closing: Closing
    plain: bool  # lead, answer, tail: with white space as the template writes it at most around the answer


class AnswerProof:
    """Of one template. What closes a turn is learnt from one row, and verified for each."""

    def __init__(self, added: AddedTokens, form: Form | None) -> None:
        self._added = added
        self._generation = form.generation if form is not None else ""
        self._opener = form.opener if form is not None else ""
        self._opened = form.opened if form is not None else None
        self._closing = form.closing if form is not None else None

    def steps(self, turns: Sequence[Turn], places: Sequence[int]) -> Steps:
        """``places`` of the answers that are to be proven, the last turn among them. Asks for renderings, a few at a time.
        Raises ConversationRejected for a conversation that the template refuses."""
        if places[0] == 0:  # no template renders a prompt of nothing
            return Mismatch.BEGINS
        if len(places) > MOST_PROVEN and any(turns[place].fields for place in places):
            return Mismatch.MANY
        *earlier, last = places
        rendered = _rendered_of(earlier)
        at_once = 1
        if earlier:
            at_once = max(1, _CHARACTERS_AT_ONCE // (1 + 2 * sum(len(turn.content) for turn in turns)))
        first, rest = rendered[:at_once], rendered[at_once:]
        whole, prompt, *more = _texts((yield [(turns, False), (turns[:last], True), *_asks(turns, first)]))
        found = yield from self._answer(turns, prompt, whole)
        if isinstance(found, Mismatch):
            return found
        ending = found.closing.ending
        text = found.text if found.closing.tail else found.text + ending
        span = AnswerSpan(found.start, found.stop + len(ending))
        if not earlier:
            return Proven(text, (span,))
        spans = {last: span}
        usual = Counter([found.closing] if found.plain else [])
        while first:
            for place, prompt, through in zip(first, more[::2], more[1::2], strict=True):
                found = yield from self._answer(turns[: place + 1], prompt, through)
                shown = _within(text, found)
                if shown is None or isinstance(found, Mismatch):
                    return found if found in _OF_ONE_ANSWER else Mismatch.EARLIER
                spans[place] = shown
                usual.update([found.closing] if found.plain else [])
            first, rest = rest[:at_once], rest[at_once:]
            if first:
                more = _texts((yield _asks(turns, first)))
        others = [place for place in earlier if place not in spans]
        if others:
            odd = yield from self._by_surroundings(turns, others, text, spans, usual)
            for place in odd:
                prompt, through = _texts((yield _asks(turns, [place])))
                found = yield from self._answer(turns[: place + 1], prompt, through)
                shown = _within(text, found)
                if shown is None:
                    return Mismatch.EARLIER
                spans[place] = shown
            if len(spans) < len(places):
                return Mismatch.EARLIER
        return Proven(text, tuple(spans[place] for place in places))

    def _answer(
        self, turns: Sequence[Turn], prompt: str, through: str
    ) -> Generator[list[Ask], list[str | ConversationRejected], _Found | Mismatch]:
        """The last of ``turns``."""
        if turns[-1].fields:
            return (yield from self._beside(turns, prompt, through))
        return self._known(turns, prompt, through) or (yield from self._probed(turns, prompt, through))

    def _known(self, turns: Sequence[Turn], prompt: str, through: str) -> _Found | None:
        closing = self._closing
        return self._fitting(closing, prompt, through, turns[-1].content) if closing is not None else None

    def _beside(
        self, turns: Sequence[Turn], prompt: str, through: str
    ) -> Generator[list[Ask], list[str | ConversationRejected], _Found | Mismatch]:
        """An answer with calls or thoughts."""
        if not through.startswith(prompt):
            return self._unlike_prompt(turns)
        closing: Closing | Mismatch | None = self._closing
        if closing is None:
            closing = yield from self._placeholder(turns, prompt)
        usual = closing if isinstance(closing, Closing) else None
        ended = closings.closing_beside(through, len(prompt), usual, self._added, calls=bool(turns[-1].calls))
        if ended is None:
            return Mismatch.ENDLESS
        stop = len(through) - len(ended.tail)
        lost = left_out(turns[-1], through[len(prompt) : stop])
        if lost is not None:
            return Mismatch[lost.name]
        return _Found(through, len(prompt), stop, ended, False)

    def _probed(
        self, turns: Sequence[Turn], prompt: str, through: str
    ) -> Generator[list[Ask], list[str | ConversationRejected], _Found | Mismatch]:
        content = turns[-1].content
        closing = yield from self._placeholder(turns, prompt)
        if isinstance(closing, Mismatch):
            return closing
        if through.startswith(prompt):
            found = self._fitting(closing, prompt, through, content)
            if found is not None:
                self._closing = closing
                return found
            return Mismatch.ALTERED if not self._opened else Mismatch.THOUGHT
        if self._opened is None:
            return self._unlike_prompt(turns)
        written = closings.after_opened(content, self._opened, prompt)
        if written is None:
            return Mismatch.THOUGHT
        text = prompt + written
        return _Found(text + closing.tail, len(prompt), len(text), closing, False)

    def _unlike_prompt(self, turns: Sequence[Turn]) -> Mismatch:
        if any(turn.fields for turn in turns[:-1]):
            return Mismatch.CONTEXT
        return Mismatch.PROMPT if self._opened is None else Mismatch.THOUGHT

    def _placeholder(
        self, turns: Sequence[Turn], prompt: str
    ) -> Generator[list[Ask], list[str | ConversationRejected], Closing | Mismatch]:
        """What stands around a placeholder in the place of the last turn."""
        before, answer = turns[:-1], Turn(ASSISTANT, ANSWER)
        probe, longer = yield [([*before, answer], False), ([*before, answer, Turn(USER, NEXT)], False)]
        if isinstance(probe, ConversationRejected):
            return Mismatch.ALTERED
        lead, marked, tail = probe.removeprefix(prompt).partition(ANSWER)
        following = (
            None
            if isinstance(longer, ConversationRejected)
            else longer.rpartition(ANSWER)[2].rpartition(NEXT)[0]
        )
        if not marked:
            return Mismatch.ALTERED
        closing = closings.closing_of(lead, tail, following, self._generation, self._added)
        return closing if closing is not None else Mismatch.ENDLESS

    def _fitting(self, closing: Closing, prompt: str, through: str, content: str) -> _Found | None:
        if not through.startswith(prompt) or not through.endswith(closing.tail):
            return None
        stop = len(through) - len(closing.tail)
        written = through[len(prompt) : stop]
        if written.startswith(closing.lead):
            middle = written[len(closing.lead) :]
            if middle == content or middle.strip() == content.strip():
                return _Found(through, len(prompt), stop, closing, True)
        for one in _trimmed(content):
            if written.endswith(one):
                lead = written[: len(written) - len(one)]
                return _Found(through, len(prompt), stop, closing._replace(lead=lead), True)
        written, answer = closings.squeezed(written), closings.squeezed(content)
        if self._opened is not None and answer.startswith(self._opened):  # the prompt has it
            answer = closings.squeezed(answer.removeprefix(self._opened))
        fits = bool(answer) and written.endswith(answer)
        return _Found(through, len(prompt), stop, closing, False) if fits else None

    def _by_surroundings(
        self,
        turns: Sequence[Turn],
        places: Sequence[int],
        text: str,
        spans: dict[int, AnswerSpan],
        usual: Counter[Closing],
    ) -> Generator[list[Ask], list[str | ConversationRejected], list[int]]:
        """Adds to ``spans`` what is proven so; returns what may be tried by renderings of its own. ``usual``: what stands
        around answers that were rendered."""
        if not usual or not self._opener:
            return list(places[:_RETRIED])
        closing = usual.most_common(1)[0][0]
        wanted = set(places)
        marked = [
            turn._replace(content=ANSWER) if place in wanted else turn for place, turn in enumerate(turns)
        ]
        (shown,) = _texts((yield [(marked, False)]))
        pieces = shown.split(ANSWER)
        if len(pieces) != len(places) + 1:
            return []
        odd: list[int] = []
        start = self._opener + closing.lead
        at = len(pieces[0]) if text.startswith(pieces[0]) else -1
        for place, piece in zip(places, pieces[1:], strict=True):
            size = _size_of(turns[place].content, text, at, piece) if at >= 0 else None
            if size is None:
                return []
            end = next(
                (one for one in (closing.ending, closing.inner) if one and piece.startswith(one)), None
            )
            if end is not None and text.endswith(start, 0, at) and turns[place - 1].role == USER:
                spans[place] = AnswerSpan(at - len(closing.lead), at + size + len(end))
            else:
                odd.append(place)
            at += size + len(piece)
        return odd if len(odd) <= _RETRIED else []


def _texts(rendered: list[str | ConversationRejected]) -> list[str]:
    """Raises the first refusal."""
    for one in rendered:
        if isinstance(one, ConversationRejected):
            raise one
    return cast("list[str]", rendered)


def _asks(turns: Sequence[Turn], places: Sequence[int]) -> list[Ask]:
    return [one for place in places for one in ((turns[:place], True), (turns[: place + 1], False))]


def _rendered_of(places: Sequence[int]) -> Sequence[int]:
    """Those of many that are rendered: at both ends, and some between."""
    most = MOST_PROVEN - 1
    if len(places) <= most:
        return places
    between = most - 2 * _AT_BOTH_ENDS
    inner = places[_AT_BOTH_ENDS:-_AT_BOTH_ENDS]
    return [
        *places[:_AT_BOTH_ENDS],
        *(inner[number * len(inner) // between] for number in range(between)),
        *places[-_AT_BOTH_ENDS:],
    ]


def _within(text: str, found: _Found | Mismatch) -> AnswerSpan | None:
    """An answer's place in the whole text, where that has it just so."""
    if isinstance(found, Mismatch) or not text.startswith(found.text[: found.stop]):
        return None
    closing = found.closing
    end = next(
        (one for one in (closing.ending, closing.inner) if one and text.startswith(one, found.stop)), None
    )
    return AnswerSpan(found.start, found.stop + len(end)) if end is not None else None


def _size_of(content: str, text: str, at: int, piece: str) -> int | None:
    """Characters of an answer as the template writes it, trimmed or not, with ``piece`` behind it."""
    for one in _trimmed(content):
        if text.startswith(one, at) and text.startswith(piece, at + len(one)):
            return len(one)
    return None


def _trimmed(content: str) -> Iterator[str]:
    yield content
    yield content.strip()
    yield content.rstrip()
    yield content.lstrip()
