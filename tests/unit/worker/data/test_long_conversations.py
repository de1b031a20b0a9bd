"""Long conversations: the same labels as by rendering every answer, in work that grows with the conversation alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mlora_worker.data.reading.row_types import Chat, Drop, Turn
from mlora_worker.data.tokenizing import answer_spans, answer_tokens, conversations
from mlora_worker.data.tokenizing.answer_spans import MOST_PROVEN, Mismatch
from mlora_worker.data.tokenizing.chat_template import ChatEncoder, Encoded, RowRejected
from mlora_worker.data.tokenizing.conversations import MOST_CHARACTERS, MOST_TURNS
from mlora_worker.data.tokenizing.rendering import ChatTemplate, ConversationRejected
from mlora_worker.protocol import FailureReason, TrainOn
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.unit.worker.data.published_forms import DISTINCT, FORMS, Form, tokenizer_of

MANY = [form for form in DISTINCT if form.both is not None]
QWEN = next(form for form in FORMS if form.name == "Qwen2.5")
PLAIN_TEXT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def rounds(count: int, *answers: str) -> Chat:
    said = answers or ("It is four.", " the answer\n", "ü", "two  ")
    turns = [
        turn
        for number in range(count)
        for turn in (Turn("user", f"What is {number}?"), Turn("assistant", said[number % len(said)]))
    ]
    return Chat(1, tuple(turns))


def encode(tokenizer: Any, chat: Chat) -> Encoded | Drop:
    (row,) = ChatEncoder(tokenizer).encode([chat])
    return row


@pytest.mark.parametrize("form", MANY, ids=lambda form: form.name)
def test_the_labels_are_those_of_a_proof_of_every_answer(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(form)
    row = encode(tokenizer, rounds(MOST_PROVEN + 20))
    monkeypatch.setattr(answer_spans, "MOST_PROVEN", 1000)
    monkeypatch.setattr(answer_tokens, "_MANY", 1000)
    whole = encode(tokenizer, rounds(MOST_PROVEN + 20))
    assert isinstance(row, Encoded)
    assert isinstance(whole, Encoded)
    assert row.ids.tolist() == whole.ids.tolist()
    assert row.supervised.tolist() == whole.supervised.tolist()
    assert row.supervised.sum() > 2 * MOST_PROVEN


def test_a_long_conversation_without_added_tokens_is_cut_at_each_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = tiny_tokenizer(PLAIN_TEXT, specials=["<eos>"], eos_token="<eos>")
    monkeypatch.setattr(answer_tokens, "_WINDOW", 40)
    chat = rounds(MOST_PROVEN + 20, "the answer", "it is", "4")
    row = encode(tokenizer, chat)
    assert isinstance(row, Encoded)
    assert tokenizer.decode(row.ids[row.supervised]) == "the answer\nit is\n4\n" * 17 + "the answer\n"
    assert tokenizer.decode(row.ids) == "".join(f"{turn.role}: {turn.content}\n" for turn in chat.turns)


class CountedTemplate(ChatTemplate):
    characters = 0

    def render_all(self, asked: Sequence[tuple[Sequence[Turn], bool]]) -> list[str | ConversationRejected]:
        made = super().render_all(asked)
        CountedTemplate.characters += sum(len(one) for one in made if isinstance(one, str))
        return made


class CountedBackend:
    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch(self, texts: Sequence[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch(texts, **options)


class CountedTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.backend_tokenizer = CountedBackend(tokenizer.backend_tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("name", ["Qwen2.5", "Llama 2", "Phi-3", "ERNIE 4.5", "text alone"])
def test_the_work_grows_with_the_conversation_and_not_with_its_square(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlora_worker.data.tokenizing.chat_template.ChatTemplate", CountedTemplate)
    work = []
    for count in (200, 800):
        tokenizer = (
            tokenizer_of(next(form for form in FORMS if form.name == name))
            if name != "text alone"
            else tiny_tokenizer(PLAIN_TEXT, specials=["<eos>"], eos_token="<eos>")
        )
        counted = CountedTokenizer(tokenizer)
        CountedTemplate.characters = 0
        chat = rounds(count, "It is four.")
        assert isinstance(encode(counted, chat), Encoded)
        size = sum(len(turn.content) for turn in chat.turns)
        work.append((CountedTemplate.characters / size, counted.backend_tokenizer.characters / size))
    (rendered, tokenised), (later_rendered, later_tokenised) = work
    assert later_rendered < 1.1 * rendered
    assert rendered < 8 * MOST_PROVEN
    assert later_tokenised < 2 * tokenised < 2 * 4 * MOST_PROVEN


ODD = {
    "every 50th answer has a lead": "{% if loop.index0 % 50 == 1 %}So: {% endif %}",
    "one answer has a lead": "{% if loop.index0 == 101 %}So: {% endif %}",
}


@pytest.mark.parametrize("lead", ODD.values(), ids=ODD)
def test_what_stands_around_an_answer_is_seen_at_every_answer(lead: str) -> None:
    """An answer that something else stands around is rendered on its own."""
    tokenizer = tokenizer_of(QWEN)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + lead
        + "{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = encode(tokenizer, rounds(80, "two"))
    assert isinstance(row, Encoded)
    text = tokenizer.decode(row.ids[row.supervised])
    assert text.replace("So: ", "") == "two<|im_end|>" * 80
    assert text.count("So: ") == tokenizer.decode(row.ids).count("So: ") > 0


def test_a_conversation_whose_answers_are_shown_otherwise_in_its_midst_is_refused() -> None:
    """Answers that are rendered each in its place are shown as they are; of one between, the end is missing."""
    tokenizer = tokenizer_of(QWEN)
    tokenizer.chat_template = (
        "{% set all = messages %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if not (all | length > 150 and 60 < loop.index0 < 90 and m.role == 'assistant') %}<|im_end|>{% endif %}"
        "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = ChatEncoder(tokenizer)
    assert isinstance(encoder.encode([rounds(60)])[0], Encoded)
    assert encoder.encode([rounds(80)]) == [Drop.TEMPLATE_MISMATCH]
    assert encoder.why_mismatched() is Mismatch.EARLIER


def test_answers_that_follow_one_another_directly_are_rendered_on_their_own() -> None:
    tokenizer = tokenizer_of(QWEN)
    turns = list(rounds(80, "two").turns)
    turns.insert(100, Turn("assistant", "more"))
    row = encode(tokenizer, Chat(1, tuple(turns)))
    assert isinstance(row, Encoded)
    assert tokenizer.decode(row.ids[row.supervised]).count("more<|im_end|>") == 1


@pytest.mark.parametrize(
    ("chat", "told"),
    [
        (Chat(7, rounds(MOST_TURNS // 2).turns + rounds(1).turns), f"has {MOST_TURNS + 2:,} turns"),
        (Chat(7, (Turn("user", "a" * MOST_CHARACTERS), Turn("assistant", "b"))), "2,000,001 characters"),
    ],
    ids=["turns", "characters"],
)
@pytest.mark.parametrize("train_on", TrainOn)
def test_a_conversation_beyond_the_bound_is_refused_with_its_line(
    chat: Chat, told: str, train_on: TrainOn
) -> None:
    with pytest.raises(RowRejected, match=told) as caught:
        ChatEncoder(tokenizer_of(QWEN), train_on).encode([rounds(1), chat])
    assert caught.value.line == 7
    assert caught.value.reason is FailureReason.INVALID_ROW
    assert "split it into several rows" in str(caught.value)


def test_little_is_rendered_together_whatever_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no more than a few renderings are held at once."""
    sizes: list[int] = []

    class Watched(ChatTemplate):
        def render_all(
            self, asked: Sequence[tuple[Sequence[Turn], bool]]
        ) -> list[str | ConversationRejected]:
            made = super().render_all(asked)
            sizes.append(sum(len(one) for one in made if isinstance(one, str)))
            return made

    monkeypatch.setattr("mlora_worker.data.tokenizing.chat_template.ChatTemplate", Watched)
    monkeypatch.setattr(answer_spans, "_CHARACTERS_AT_ONCE", 20_000)
    monkeypatch.setattr(conversations, "_CHARACTERS_TOGETHER", 20_000)
    chats = [rounds(20, "a" * 500)] * 10
    made = ChatEncoder(tokenizer_of(QWEN)).encode(chats)
    assert all(isinstance(row, Encoded) for row in made)
    assert max(sizes) < 100_000 < sum(sizes)
