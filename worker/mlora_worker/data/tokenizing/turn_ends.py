"""What a chat template writes around turns, and where a turn ends. Pure: texts in, texts out.

All of it is seen in renderings of placeholders. Where a turn ends, by the first of these that applies:

1. Nothing is behind the last answer: the added token that begins the next turn ends this one (``<|user|>`` of GLM-4),
   unless the generation prompt has it, too, for then it is no end.
2. No added token is behind it: what is there is plain text and taken at its word, but for trailing white space.
3. The first added token behind it; with those that follow it directly, and as far as the end-of-sequence token, where the
   template writes these behind every answer and not only behind the last one.

An answer that another turn follows may be closed otherwise than the last one (``inner``): by another added token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mlora_worker.data.reading.row_types import ASSISTANT, USER, Turn
from mlora_worker.data.tokenizing.prefix_tokens import common_beginning

QUESTION, ANSWER, NEXT = "Qx3questionK", "Qx7placeholderK", "Qx9followingK"  # in the place of texts

# <think>, </think>, <seed:think>, [THINK], <|START_THINKING|>
_THOUGHT = r"[<\[]\|?{}[^<>\[\]\s]*think[^<>\[\]\s]*[>\]]"
_THOUGHT_MARK = re.compile(_THOUGHT.format("/?"), re.IGNORECASE)
_SPACED_MARK = re.compile(rf"\s*({_THOUGHT_MARK.pattern})\s*", re.IGNORECASE)
_OPENED = re.compile(r"([<\[][^/<>\[\]\s][^<>\[\]\s]*[>\]])\s*\Z")


class AddedTokens:
    """Those of a tokenizer, as texts."""

    def __init__(self, names: Iterable[str], eos: str | None, bos: str | None = None) -> None:
        self.eos, self.bos = eos, bos
        longest_first = sorted(filter(str.strip, names), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def within(self, text: str) -> Iterator[re.Match[str]]:
        """From the left, and of two at one place the longer."""
        return self._pattern.finditer(text)


class Closing(NamedTuple):
    """What a template writes around an answer. The model writes ``lead``, the answer, ``ending``."""

    lead: str
    tail: str  # all that stands behind the last answer
    ending: str
    inner: str  # in the place of ``ending`` where another turn follows; empty: the same


class Form(NamedTuple):
    """What the template writes around turns, as placeholders show it."""

    opener: str  # between a user's text and the answer, in a prompt
    generation: str  # the part of it that is there for the sake of the answer alone
    tokens: frozenset[str]  # the added tokens that it writes
    closing: Closing | None  # None where answers do not stand behind the generation prompt
    ends: tuple[str, ...]  # what an answer's own text may end in, though the template writes it
    begins_with: tuple[str, ...]  # added tokens that begin a conversation or a user's turn
    begins_plain: tuple[str, ...]  # the text after such tokens, or in their place
    answer_begins: tuple[str, ...]  # the generation prompt, where it has an added token

    @property
    def opened(self) -> str | None:
        """The mark, such as ``<think>``, of a thought that the generation prompt begins."""
        found = _OPENED.search(self.generation)
        return found[1] if found is not None and is_thought_mark(found[1]) else None


def form_questions() -> list[tuple[list[Turn], bool]]:
    """Conversations, and whether each is asked for with the generation prompt: ``form_of`` takes their renderings."""
    user, answer = Turn(USER, QUESTION), Turn(ASSISTANT, ANSWER)
    return [
        ([user], True),
        ([user], False),
        ([user, answer], False),
        ([user, answer, Turn(USER, NEXT)], False),
    ]


def form_of(prompt: str, bare: str, answered: str, longer: str | None, added: AddedTokens) -> Form | None:
    """``longer`` None: the template refuses a conversation that ends so."""
    head, found, opener = prompt.partition(QUESTION)
    if not found:
        return None
    closed = bare.partition(QUESTION)[2]
    same = len(common_beginning(opener, closed))
    cut = next((one.start() for one in added.within(opener) if one.start() < same < one.end()), same)
    generation = opener[cut:]
    between = longer.partition(ANSWER)[2].partition(NEXT)[0] if longer is not None else None
    lead, _, tail = answered.removeprefix(prompt).partition(ANSWER)
    closing = closing_of(lead, tail, between, generation, added)
    ended = len(closing.inner or closing.ending) if closing is not None and closing.tail else 0
    first = [_without_tokens(text.strip(), added) for text in (head, (between or "")[ended:])]
    return Form(
        opener,
        generation,
        frozenset(one[0] for text in (prompt, bare, answered, longer or "") for one in added.within(text)),
        closing if answered.startswith(prompt) else None,
        _ends_of(closing, added),
        tuple({token for token, _ in first if token}),
        tuple({plain for _, plain in first if plain}),
        (generation.strip(),) if next(added.within(generation), None) is not None else (),
    )


def _without_tokens(text: str, added: AddedTokens) -> tuple[str, str]:
    """The added token that begins ``text``, and what follows it and others directly behind it."""
    token = ""
    while (first := next(added.within(text), None)) is not None and first.start() == 0:
        token = token or first[0]
        text = text[first.end() :].lstrip()
    return token, text


def closing_of(
    lead: str, tail: str, following: str | None, generation: str, added: AddedTokens
) -> Closing | None:
    """``following``: what stands between an answer and the text of a user's turn that follows it; None: no such
    conversation is rendered. None where nothing ends the turn: the model would never stop."""
    following = following or ""
    next_turn = _end_of_turn(following, generation, added)
    if not tail:
        return Closing(lead, "", next_turn, "") if next_turn else None
    ends = list(added.within(tail))
    if not ends:
        return Closing(lead, tail, tail.rstrip() or tail, "")
    stop = ends[0].end()
    always = len(common_beginning(tail, following) if following else tail)
    if stop <= always:
        for one in ends[1:]:
            if one.end() <= always and (one.start() == stop or _is_eos_after(tail, stop, one, added)):
                stop = one.end()
        return Closing(lead, tail, tail[:stop], "")
    return Closing(lead, tail, tail[:stop], next_turn)


def closing_beside(
    through: str, start: int, usual: Closing | None, added: AddedTokens, *, calls: bool
) -> Closing | None:
    """Of an answer that has calls or thoughts, which begins at ``start`` and ends with ``through``. It is closed as an
    answer of text is (``usual``), or, with ``calls``, by the added token at its end. Calls behind which nothing is
    written end nowhere: what follows them is no user's turn."""
    if usual is not None and through.endswith(usual.tail) and (usual.tail or not calls):
        return usual
    if not calls or (usual is not None and not usual.tail):
        return None
    for last in list(added.within(through))[-1:]:
        tail = through[last.start() :]
        if last.start() >= start and tail.strip() == last[0].strip():
            return Closing("", tail, last[0], "")
    return None


def _is_eos_after(tail: str, stop: int, one: re.Match[str], added: AddedTokens) -> bool:
    return one[0] == added.eos and not tail[stop : one.start()].strip()


def _end_of_turn(following: str, generation: str, added: AddedTokens) -> str:
    """Up to the end of an added token that comes at once, and says that a turn is over: empty where there is none."""
    first = next(added.within(following), None)
    if first is None or following[: first.start()].strip() or first[0] == added.bos != added.eos:
        return ""
    return "" if any(one[0] == first[0] for one in added.within(generation)) else following[: first.end()]


def is_thought_mark(name: str) -> bool:
    return _THOUGHT_MARK.fullmatch(name) is not None


def squeezed(text: str) -> str:
    """Without the white space around thoughts: templates write it in ways of their own."""
    return _SPACED_MARK.sub(r"\1", text).strip() if "hink" in text or "HINK" in text else text.strip()


def after_opened(answer: str, mark: str, prompt: str) -> str | None:
    """What is left of an answer to write after a prompt that has begun its thought with ``mark``; None: it has none."""
    if answer.lstrip().startswith(mark):
        white = prompt[len(prompt.rstrip()) :]
        return answer.lstrip()[len(mark) :].removeprefix(white)
    return answer if _closes(mark) in answer else None


def _closes(mark: str) -> str:
    return mark.replace("START", "END") if "START" in mark else f"{mark[0]}/{mark[1:]}"


def _ends_of(closing: Closing | None, added: AddedTokens) -> tuple[str, ...]:
    ends = {added.eos or ""}
    for text in (closing.ending, closing.inner) if closing is not None else ():
        ends |= {text.rstrip(), *(one[0] for one in added.within(text))}
    return tuple(sorted(filter(str.strip, ends), key=len, reverse=True))


def without_end(answer: str, ends: tuple[str, ...]) -> str:
    """An answer without what ends its turn: it is written behind the answer anyway, and learnt once."""
    bare = answer.rstrip()
    while bare.endswith(ends):
        answer = bare.removesuffix(next(one for one in ends if bare.endswith(one)))
        bare = answer.rstrip()
    return answer


def looks_rendered(turn: Turn, form: Form, added: AddedTokens) -> bool:
    """Whether its text begins as the template begins such a turn, and has more of what the template writes."""
    text = turn.content.lstrip()
    if turn.role == ASSISTANT:
        return text.startswith(form.answer_begins)
    plain, special = text.startswith(form.begins_plain), text.startswith(form.begins_with)
    if not plain and not special:
        return False
    opener = form.opener.strip()
    if opener and opener in text:
        return True
    return special and any(one[0] in form.tokens for one in added.within(text) if one.start())
