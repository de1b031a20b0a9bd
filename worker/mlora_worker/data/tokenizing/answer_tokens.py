"""Which tokens of a rendered row are its answers.

A server tokenises the prompt alone. Its tokens must be the beginning of the row's. What stands before an added token
becomes the same tokens whatever follows, so of a prompt only its ending, from its last added token on, is tokenised once
more and compared; nearly all rows have the same ending.

Where the row's tokens are others, because a token reaches over the place at which the answer begins (a prompt that ends
in a space, or a newline before an answer's newline), the row is cut there: it gets the prompt's tokens as the server has
them, and then those of the answer alone, up to the next added token. That is what the model sees, and what it has to write.

At its end an answer needs no cut: what closes a turn is a token of its own, or the row is refused. It may have taken white
space that follows it, as some tokens do (``rstrip``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from mlora_worker.data.tokenizing.answer_spans import AnswerSpan
from mlora_worker.data.tokenizing.special_text import is_stand_in
from mlora_worker.data.tokenizing.text_tokens import Coded, Encode, Tokens, TokenSpans, places_of

_CHARACTERS_AT_ONCE = 2_000_000
_FEW = 8  # answers, whose places are looked up one by one
_MOST_ENDINGS = 256  # that are remembered; conversations with a template have one
_LONGEST_ENDING = 256  # characters of these

# Of a conversation with many answers and no added tokens, endings are windows: a tokenizer works from left to right and
# sees little of what is further on, so that one which agrees with the row's tokens for so long has found them.
_MANY, _WINDOW = 32, 512  # answers, tokens

# A text is tokenised behind one of these and is cut off from it again, so that it is none that begins a sequence.
_CONTEXTS = ("\n", "a", ".", "1", " ")


class Cut(NamedTuple):
    ids: list[int]
    answers: list[tuple[int, int]]  # first token, and the one after the last


class Cuts:
    """With one tokenizer."""

    def __init__(self, backend: Any, encode: Encode) -> None:
        added = backend.get_added_tokens_decoder()
        self._encode = encode
        self._cutters = {
            number: one.content for number, one in added.items() if not (one.normalized or one.single_word)
        }
        self._takes_white_space = {number for number, one in added.items() if one.rstrip}
        self._endings: dict[str, Coded] = {}
        self._latest = ""

    def of(self, rows: Sequence[LabelledRow]) -> list[Cut | None]:
        """None for a row in which it cannot be seen."""
        made = [self._short_way(row) for row in rows]
        longer = [row for row, cut in zip(rows, made, strict=True) if cut is None]
        found = iter(self._long_way(longer))
        return [next(found) if cut is None else cut for cut in made]

    def _short_way(self, row: LabelledRow) -> Cut | None:
        """Nearly every row goes it: its prompts end as the latest one did."""
        if len(row.spans) > _FEW or row.encode is not self._encode:
            return None
        ids = row.tokens.ids
        answers = []
        for start, end in row.spans:
            ending = self._known_ending(row.text, start)
            if ending is None:
                return None
            first = row.tokens.begins_at(start - len(ending))
            after = row.tokens.begins_at(end) if end < len(row.text) else len(ids)
            if first is None or after is None:
                return None
            known = self._endings[ending].ids
            begun = first + len(known)
            if ids[first:begun] != known or begun >= after:
                return None
            answers.append((begun, after))
        return Cut(ids, answers)

    def _known_ending(self, text: str, start: int) -> str | None:
        if self._latest in self._endings and text.endswith(self._latest, 0, start):
            return self._latest
        found = next((one for one in self._endings if text.endswith(one, 0, start)), None)
        self._latest = found or self._latest
        return found

    def _long_way(self, rows: Sequence[LabelledRow]) -> Iterator[Cut | None]:
        works = [_Work(row, self._cutters) for row in rows]
        asked = [(work, ending) for work in works for ending in work.endings]
        unknown = []
        for work, ending in asked:
            known = self._endings.get(work.text_of(ending)) if self._is_usual(work, ending) else None
            if known is not None:
                work.compare(ending, known)
            else:
                unknown.append((work, ending))
        prompts = _encoded((work.row.encode, work.text_of(ending)) for work, ending in unknown)
        for (work, ending), coded in zip(unknown, prompts, strict=True):
            work.compare(ending, coded)
            if self._is_usual(work, ending) and len(self._endings) < _MOST_ENDINGS:
                self._endings[work.text_of(ending)] = coded
        behind = [(work, ending) for work in works for ending in work.to_cut()]
        for (_, ending), continued in zip(behind, self._continuations(behind), strict=True):
            ending.continued = continued
        return (work.cut(self._takes_white_space) for work in works)

    def _is_usual(self, work: _Work, ending: _Ending) -> bool:
        return (
            ending.cutter and ending.start - ending.at <= _LONGEST_ENDING and work.row.encode is self._encode
        )

    def _continuations(self, asked: Sequence[tuple[_Work, _Ending]]) -> list[_Continued | None]:
        texts = [work.row.text[ending.start : ending.until] for work, ending in asked]
        found: list[_Continued | None] = [None] * len(asked)
        for context in _CONTEXTS:
            missing = [place for place, one in enumerate(found) if one is None]
            made = _encoded((asked[place][0].row.encode, context + texts[place]) for place in missing)
            for place, coded in zip(missing, made, strict=True):
                found[place] = _without_context(coded, len(context), asked[place][1].start)
        return found


class LabelledRow(NamedTuple):
    text: str
    spans: Sequence[AnswerSpan]
    tokens: Tokens
    encode: Encode  # other texts, as this one was


class _Continued(NamedTuple):
    ids: list[int]
    places: TokenSpans


class _Ending:
    """Of the prompt of one answer, from the token ``first`` on."""

    def __init__(self, start: int, first: int, at: int, *, cutter: bool, window: bool) -> None:
        self.start = start  # of the answer
        self.first, self.at = first, at  # token and character at which it begins
        self.cutter = cutter  # with an added token
        self.window = window
        self.length: int | None = None  # of the prompt, in the row's tokens; None: they do not begin with it
        self.coded: Coded | None = None  # what they should begin with instead
        self.until = start  # where what is tokenised alone ends
        self.after = first  # the token that follows it
        self.continued: _Continued | None = None


class _Work:
    """On one row."""

    def __init__(self, row: LabelledRow, cutters: Mapping[int, str]) -> None:
        self.row = row
        self._cutters = cutters
        self._ids = row.tokens.ids
        self._places = row.tokens.places()
        befores = [0, *(self._places.begun(span.start) for span in row.spans)]
        self.endings = [
            self._ending(span.start, before) for span, before in zip(row.spans, befores, strict=False)
        ]
        self._cut: list[_Ending] = []
        self._whole_prompt = False  # one that is to be cut has no added token before it

    def _ending(self, start: int, before: int) -> _Ending:
        """``before``: the first token of the answer before it."""
        begun = self._places.begun(start)
        many = len(self.row.spans) > _MANY
        tokens = range(begun - 1, before - 1 if many else -1, -1)
        first = next(filter(self._cuts, tokens), None)
        if first is not None:
            return _Ending(start, first, self._places.begins[first], cutter=True, window=False)
        first = max(0, begun - _WINDOW) if many else 0
        return _Ending(
            start, first, self._places.begins[first] if first else 0, cutter=False, window=first > 0
        )

    def _cuts(self, token: int) -> bool:
        """Whether it is an added token: a vocabulary may have its number for text, too, such as one byte."""
        name = self._cutters.get(self._ids[token])
        if name is None:
            return False
        written = self.row.text[self._places.begins[token] : self._places.ends[token]].strip()
        return written == name or is_stand_in(written)

    def text_of(self, ending: _Ending) -> str:
        return self.row.text[ending.at : ending.start]

    def compare(self, ending: _Ending, coded: Coded) -> None:
        """``coded``: the ending alone. It is kept only where it is needed: of a long conversation they are far longer than
        it is."""
        ids = coded.ids
        if ending.window:
            stop, same = self._places.begun(ending.start), len(ids) // 2
            agrees = self._ids[stop - same : stop] == ids[-same:]
        else:
            stop = ending.first + len(ids)
            agrees = self._ids[ending.first : stop] == ids
        if agrees:
            ending.length = stop
            return
        if ending.cutter or not (ending.window or self._whole_prompt):
            ending.coded = coded
        self._whole_prompt |= not ending.cutter
        self._cut.append(ending)

    def to_cut(self) -> list[_Ending]:
        self._cut.sort(key=lambda one: one.start)
        for ending, following in zip_longest(self._cut, self._cut[1:]):
            last = self._places.begun(following.start) if following is not None else len(self._ids)
            tokens = range(self._places.begun(ending.start), last)
            after = next(filter(self._cuts, tokens), None)
            if after is not None:
                ending.after, ending.until = after, self._places.begins[after]
            else:
                ending.after = last
                ending.until = following.start if following is not None else len(self.row.text)
        return self._cut

    def cut(self, takes_white_space: set[int]) -> Cut | None:
        starts = [one.length for one in self.endings]
        ids, places = self._ids, self._places
        if self._cut:
            patched = self._patched()
            if patched is None:
                return None
            ids, places = patched
            starts = [places.begun(one.start) for one in self.endings]
        answers = []
        for (start, end), first in zip(self.row.spans, starts, strict=True):
            after = places.begun(end) if end < len(self.row.text) else len(ids)
            if first is None or first >= after:
                return None
            # What a token takes beyond the prompt, or the turn's end.
            for last, place in ((first - 1, start), (after - 1, end)):
                taken = self.row.text[place : places.ends[last]] if last >= 0 else ""
                if taken and not (taken.isspace() and ids[last] in takes_white_space):
                    return None
            answers.append((first, after))
        return Cut(ids, answers)

    def _patched(self) -> _Continued | None:
        ids: list[int] = []
        begins: list[int] = []
        ends: list[int] = []

        def add(tokens: Sequence[int], places: TokenSpans) -> None:
            ids.extend(tokens)
            begins.extend(places.begins)
            ends.extend(places.ends)

        done = 0  # tokens of the row; what was cut last ends with a following prompt where ``reached`` is its end
        reached = -1
        for ending in self._cut:
            if ending.continued is None:
                return None
            if reached != ending.start:
                if ending.coded is None:
                    return None
                kept = slice(done, ending.first)
                add(self._ids[kept], TokenSpans(self._places.begins[kept], self._places.ends[kept]))
                add(ending.coded.ids, places_of(ending.coded.places, ending.at))
            add(*ending.continued)
            done, reached = ending.after, ending.until
        rest = slice(done, None)
        if self._cut[-1].until < len(self.row.text):
            add(self._ids[rest], TokenSpans(self._places.begins[rest], self._places.ends[rest]))
        return _Continued(ids, TokenSpans(begins, ends))


def _encoded(asked: Iterable[tuple[Encode, str]]) -> Iterator[Coded]:
    """Some at a time."""
    for encode, group in groupby(asked, key=itemgetter(0)):
        waiting: list[str] = []
        characters = 0
        for _, text in group:
            waiting.append(text)
            characters += len(text)
            if characters >= _CHARACTERS_AT_ONCE:
                yield from encode(waiting)
                waiting, characters = [], 0
        if waiting:
            yield from encode(waiting)


def _without_context(coded: Coded, size: int, start: int) -> _Continued | None:
    """None where a token reaches over the context's end."""
    places = places_of(coded.places, start - size)
    count = places.begun(start)
    if any(end > start for end in places.ends[:count]):
        return None
    return _Continued(coded.ids[count:], TokenSpans(places.begins[count:], places.ends[count:]))
