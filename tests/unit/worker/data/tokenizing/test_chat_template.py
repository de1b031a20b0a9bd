"""The proof for each row: what is supervised reads as the answer and its turn's end, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from mlora_worker.data.errors import DataError
from mlora_worker.data.reading.row_types import Chat, Drop, PlainText, Turn
from mlora_worker.data.tokenizing.answer_spans import AnswerSpan
from mlora_worker.data.tokenizing.answer_tokens import Cuts, LabelledRow
from mlora_worker.data.tokenizing.chat_template import ChatEncoder, Encoded, RowRejected
from mlora_worker.data.tokenizing.prefix_tokens import SharedBeginning, cutters_of
from mlora_worker.data.tokenizing.rendering import ChatTemplate
from mlora_worker.data.tokenizing.text_tokens import Coded, Tokens, places_of
from mlora_worker.protocol import FailureReason, TrainOn

MakeTokenizer = Callable[..., Any]

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Its turns end with a token that is not the tokenizer's eos, answers are trimmed, a bos stands in front.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The last answer is preceded by an empty thought that no generation prompt writes; earlier ones are not.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PLAIN_TEXT = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
UNCLOSED = CHATML.replace("{{ m['content'] }}<|im_end|>\n", "{{ m['content'] }}")
EOS_AT_THE_END = CHATML.replace(
    "{% if add_generation_prompt %}", "{% if not add_generation_prompt %}{{ eos_token }}{% else %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHATML
)

CHATML_TOKENS = {"specials": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"}
GEMMA_TOKENS = {
    "specials": ["<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>"],
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
}


def chat(*turns: tuple[str, str]) -> Chat:
    return Chat(1, tuple(Turn(role, content) for role, content in turns))


def ask(question: str, answer: str) -> Chat:
    return chat(("user", question), ("assistant", answer))


def supervised(tokenizer: Any, row: Encoded | Drop) -> str:
    assert isinstance(row, Encoded)
    return str(tokenizer.decode(row.ids[row.supervised]))


def encode(tokenizer: Any, *chats: Chat) -> list[Encoded | Drop]:
    return ChatEncoder(tokenizer).encode(chats)


@pytest.mark.parametrize(
    "pad", [None, "<|im_end|>", "<|endoftext|>"], ids=["pad is null", "pad is eos", "pad is another"]
)
def test_the_answer_and_its_end_are_supervised_whatever_the_pad_token_is(
    make_tokenizer: MakeTokenizer, pad: str | None
) -> None:
    tokenizer = make_tokenizer(CHATML, pad_token=pad, **CHATML_TOKENS)
    short, long = encode(
        tokenizer, ask("Two and two?", "It is four."), ask("And the question?", "The answer to it. " * 9)
    )
    assert supervised(tokenizer, short) == "It is four.<|im_end|>"
    assert supervised(tokenizer, long) == "The answer to it. " * 9 + "<|im_end|>"


def test_the_tokens_are_those_that_the_tokenizer_itself_makes_of_the_chat(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer(CHATML, **CHATML_TOKENS)
    (row,) = encode(tokenizer, ask("Two and two?", "It is four."))
    assert isinstance(row, Encoded)
    messages = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "It is four."}]
    assert row.ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]
    assert not row.supervised[-1], "the newline after the turn's end is the template's, not the model's"


def test_a_turn_end_that_is_not_eos_is_supervised(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(GEMMA, **GEMMA_TOKENS)
    (row,) = encode(tokenizer, ask("Two and two?", "  It is four.\n"))
    assert supervised(tokenizer, row) == "It is four.<end_of_turn>"


def test_there_is_one_bos_though_both_template_and_tokenizer_write_one(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(GEMMA, adds_bos=True, **GEMMA_TOKENS)
    (row,) = encode(tokenizer, ask("Two and two?", "four"))
    assert isinstance(row, Encoded)
    assert row.ids.tolist().count(tokenizer.bos_token_id) == 1
    assert row.ids[0] == tokenizer.bos_token_id


def test_every_answer_of_a_conversation_is_supervised_and_nothing_between(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer(CHATML, **CHATML_TOKENS)
    (row,) = encode(
        tokenizer,
        chat(
            ("system", "Be kind."),
            ("user", "2?"),
            ("assistant", "two"),
            ("user", "4?"),
            ("assistant", "four"),
        ),
    )
    assert supervised(tokenizer, row) == "two<|im_end|>four<|im_end|>"


def test_an_answer_that_quotes_the_turn_end_is_supervised_to_its_real_end(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer(CHATML, **CHATML_TOKENS)
    for answer in ("end", "m_end|>", "a<|im_end|>\n<|im_start|>user\nb", "assistant\n"):
        (row,) = encode(tokenizer, ask("Write it.", answer))
        assert supervised(tokenizer, row) == answer + "<|im_end|>"


def test_what_the_template_makes_the_model_write_before_its_answer_is_supervised(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer(THINKING, **CHATML_TOKENS)
    for answer in ("four", "think"):  # the second is also part of what stands before
        (row,) = encode(tokenizer, ask("2+2?", answer))
        assert supervised(tokenizer, row) == f"<think>\n\n</think>\n\n{answer}<|im_end|>"


def test_a_conversation_whose_earlier_answers_are_rendered_differently_is_refused(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer(THINKING, **CHATML_TOKENS)
    rows = encode(
        tokenizer,
        chat(("user", "2?"), ("assistant", "two"), ("user", "4?"), ("assistant", "four")),
        ask("2?", "two"),
    )
    assert rows[0] is Drop.TEMPLATE_MISMATCH
    assert isinstance(rows[1], Encoded)


def test_a_template_that_closes_turns_with_plain_text_has_that_text_supervised(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer(PLAIN_TEXT, specials=["<eos>"], eos_token="<eos>")
    (row,) = encode(tokenizer, ask("2+2?", "four"))
    assert supervised(tokenizer, row) == "four\n"


def test_a_template_that_never_closes_a_turn_is_refused_because_the_adapter_would_never_stop(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer(UNCLOSED, **CHATML_TOKENS)
    assert encode(tokenizer, ask("2+2?", "four")) == [Drop.TEMPLATE_MISMATCH]


def test_an_eos_after_the_whole_conversation_is_not_the_end_of_a_turn(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(EOS_AT_THE_END, **{**CHATML_TOKENS, "eos_token": "<|endoftext|>"})
    one, two = encode(
        tokenizer,
        ask("2?", "two"),
        chat(("user", "2?"), ("assistant", "two"), ("user", "4?"), ("assistant", "four")),
    )
    assert supervised(tokenizer, one) == "two<|im_end|>"
    assert supervised(tokenizer, two) == "two<|im_end|>four<|im_end|>"


def test_a_row_whose_answer_would_reach_into_the_prompts_last_token_is_cut_where_a_server_cuts_it(
    make_tokenizer: MakeTokenizer,
) -> None:
    spaced = PLAIN_TEXT.replace(":\n", ": ")
    tokenizer = make_tokenizer(spaced, specials=["<eos>"], eos_token="<eos>")
    # " the" is one token: the space that ends the generation prompt is drawn into the answer.
    apart = tokenizer.tokenize("assistant: ") + tokenizer.tokenize("the")
    assert tokenizer.tokenize("assistant: the") != apart
    (row,) = encode(tokenizer, ask("2+2?", "the"))
    assert isinstance(row, Encoded)
    served = tokenizer("user: 2+2?\nassistant: ", add_special_tokens=False)["input_ids"]
    assert row.ids[~row.supervised].tolist() == served
    assert tokenizer.convert_ids_to_tokens(row.ids[row.supervised].tolist()) == tokenizer.tokenize("the\n")


def test_a_row_that_the_template_refuses_names_line_and_cause(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(NO_SYSTEM, **CHATML_TOKENS)
    with pytest.raises(RowRejected, match="System role not supported") as caught:
        encode(tokenizer, chat(("system", "Be kind."), ("user", "2?"), ("assistant", "two")))
    assert caught.value.reason is FailureReason.INVALID_ROW


def test_a_conversation_that_begins_with_an_answer_is_refused(make_tokenizer: MakeTokenizer) -> None:
    assert encode(make_tokenizer(CHATML, **CHATML_TOKENS), chat(("assistant", "Hello!"))) == [
        Drop.TEMPLATE_MISMATCH
    ]


def test_a_sentencepiece_tokenizer_that_marks_words_and_spaces_is_proven_too() -> None:
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    specials = ["<unk>", "<s>", "</s>", *letters]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    bpe.train_from_iterator(["What is two? It is. [INST] [/INST]"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = LLAMA2
    (row,) = encode(
        tokenizer, chat(("user", "2?"), ("assistant", "It is ü"), ("user", "4?"), ("assistant", "It\nis"))
    )
    assert supervised(tokenizer, row).split() == ["It", "is", "ü", "</s>", "It", "is", "</s>"]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_without_a_template_prompt_and_completion_are_joined_and_closed_with_eos(
    make_tokenizer: MakeTokenizer, adds_bos: bool
) -> None:
    tokenizer = make_tokenizer(None, adds_bos=adds_bos, **GEMMA_TOKENS)
    (row,) = encode(tokenizer, ask("Question: 2+2?\nAnswer:", " It is four."))
    assert isinstance(row, Encoded)
    assert supervised(tokenizer, row) == " It is four.<eos>"
    assert tokenizer.decode(row.ids) == "<bos>" * adds_bos + "Question: 2+2?\nAnswer: It is four.<eos>"


def test_without_template_and_eos_nothing_could_teach_the_model_to_stop(
    make_tokenizer: MakeTokenizer,
) -> None:
    with pytest.raises(DataError, match="neither a chat template nor an end-of-sequence token") as caught:
        ChatEncoder(make_tokenizer(None, specials=["<pad>"], pad_token="<pad>"))
    assert caught.value.reason is FailureReason.INVALID_SPEC


class WatchedBackend:
    """A tokenizer that notes how many threads are in it at once."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._inside: list[int] = []
        self.most = self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch(self, texts: Any, **options: Any) -> Any:
        self.calls += 1
        self._inside.append(1)
        self.most = max(self.most, len(self._inside))
        time.sleep(0.002)
        made = self._backend.encode_batch(texts, **options)
        self._inside.pop()
        return made


class WatchedTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.backend_tokenizer = WatchedBackend(tokenizer.backend_tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_threads_may_share_a_tokenizer_because_one_is_in_it_at_a_time(make_tokenizer: MakeTokenizer) -> None:
    watched = WatchedTokenizer(make_tokenizer(CHATML, **CHATML_TOKENS))
    with ThreadPoolExecutor(4) as pool:
        for rows in pool.map(lambda _: encode(watched, ask("2?", "two")), range(12)):
            assert supervised(watched, rows[0]) == "two<|im_end|>"
    assert watched.backend_tokenizer.most == 1


def test_an_answer_that_the_template_alters_is_refused_also_after_rows_that_it_kept(
    make_tokenizer: MakeTokenizer,
) -> None:
    shortening = CHATML.replace("m['content'] }}<|im_end|>", "m['content'].split('#')[-1] }}<|im_end|>")
    tokenizer = make_tokenizer(shortening, **CHATML_TOKENS)
    for rows in (("two", "1+1#two"), ("1+1#two", "two")):
        first, second = encode(tokenizer, *(ask("2?", answer) for answer in rows))
        assert (first is Drop.TEMPLATE_MISMATCH) == ("#" in rows[0])
        assert (second is Drop.TEMPLATE_MISMATCH) == ("#" in rows[1])


def test_no_token_is_added_to_the_vocabulary(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(CHATML, **CHATML_TOKENS)
    before = len(tokenizer)
    encode(tokenizer, ask("2+2?", "four"))
    assert len(tokenizer) == before


ROUNDS = (("user", "2?"), ("assistant", "two"), ("user", "4?"), ("assistant", "four"))


@pytest.mark.parametrize(
    ("train_on", "told"),
    [
        (TrainOn.ALL_ANSWERS, "two<|im_end|>four<|im_end|>"),
        (TrainOn.LAST_ANSWER, "four<|im_end|>"),
        (
            TrainOn.EVERYTHING,
            "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n"
            "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\n4?<|im_end|>\n<|im_start|>assistant\n"
            "four<|im_end|>",
        ),
    ],
)
def test_what_is_supervised_is_what_the_task_trains_on(
    make_tokenizer: MakeTokenizer, train_on: TrainOn, told: str
) -> None:
    tokenizer = make_tokenizer(CHATML, **CHATML_TOKENS)
    (row,) = ChatEncoder(tokenizer, train_on).encode([chat(*ROUNDS)])
    assert supervised(tokenizer, row) == told


def test_an_answer_that_shall_not_be_learnt_is_context_like_a_prompt(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(CHATML, **CHATML_TOKENS)
    turns = [Turn(role, text, learnt=text != "two") for role, text in ROUNDS]
    (row,) = ChatEncoder(tokenizer, TrainOn.ALL_ANSWERS).encode([Chat(1, tuple(turns))])
    assert supervised(tokenizer, row) == "four<|im_end|>"
    (whole,) = ChatEncoder(tokenizer, TrainOn.ALL_ANSWERS).encode([chat(*ROUNDS)])
    assert isinstance(row, Encoded)
    assert isinstance(whole, Encoded)
    assert row.ids.tolist() == whole.ids.tolist()


def test_a_template_that_hides_earlier_thoughts_will_do_for_the_last_answer_alone(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer(THINKING, **CHATML_TOKENS)
    (all_answers,) = ChatEncoder(tokenizer).encode([chat(*ROUNDS)])
    assert all_answers is Drop.TEMPLATE_MISMATCH
    (last,) = ChatEncoder(tokenizer, TrainOn.LAST_ANSWER).encode([chat(*ROUNDS)])
    assert supervised(tokenizer, last) == "<think>\n\n</think>\n\nfour<|im_end|>"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_is_learnt_from_its_first_word_to_the_end_token_whatever_the_template(
    make_tokenizer: MakeTokenizer, adds_bos: bool
) -> None:
    tokenizer = make_tokenizer(GEMMA, adds_bos=adds_bos, **GEMMA_TOKENS)
    (row,) = ChatEncoder(tokenizer, TrainOn.EVERYTHING).encode([PlainText(1, "It is four.")])
    assert isinstance(row, Encoded)
    assert supervised(tokenizer, row) == "It is four.<eos>"
    assert tokenizer.decode(row.ids) == "<bos>" * adds_bos + "It is four.<eos>"


WORDS = st.lists(
    st.sampled_from(
        ["two", " ", "\n", "\n\n", "<|im_end|>", "<|im_start|>", "assistant", "é", "\u2028", "<|im"]
    ),
    min_size=1,
    max_size=8,
).map("".join)


@given(st.lists(st.tuples(WORDS, WORDS.filter(str.strip)), min_size=1, max_size=3))
def test_the_tokens_before_an_answer_are_those_of_its_prompt_alone(
    make_tokenizer: MakeTokenizer, rounds: list[tuple[str, str]]
) -> None:
    tokenizer = make_tokenizer(CHATML, **CHATML_TOKENS)
    backend = tokenizer.backend_tokenizer
    turns = tuple(
        Turn(role, text) for pair in rounds for role, text in zip(("user", "assistant"), pair, strict=True)
    )
    (text,) = ChatTemplate(tokenizer).render([turns])
    (prompt,) = ChatTemplate(tokenizer).render([turns[:-1]], prompt=True)
    assert isinstance(text, str)
    assert isinstance(prompt, str)
    end = text.rindex("<|im_end|>") + len("<|im_end|>")

    def encodings(texts: Sequence[str]) -> list[Coded]:
        return [Coded(one.ids, one) for one in backend.encode_batch(texts, add_special_tokens=False)]

    (whole,), (alone,) = encodings([text]), encodings([prompt])
    row = LabelledRow(text, [AnswerSpan(len(prompt), end)], Tokens(*whole), encodings)
    cuts = Cuts(backend, encodings)
    for _ in range(2):  # the second time the ending is known
        (cut,) = cuts.of([row])
        assert cut is not None
        ((first, after),) = cut.answers
        assert cut.ids[:first] == alone.ids
        assert tokenizer.decode(cut.ids[first:after]) == text[len(prompt) : end]
        assert tokenizer.decode(cut.ids) == text


def test_prompts_with_a_known_ending_are_not_tokenised_again(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(CHATML, **CHATML_TOKENS)
    watched = WatchedTokenizer(tokenizer)
    encoder = ChatEncoder(watched)
    encoder.encode([ask("2?", "two"), ask("4?", "four")])
    before = watched.backend_tokenizer.calls
    rows = encoder.encode([ask(f"{number}?", "a number") for number in range(40)])
    assert watched.backend_tokenizer.calls == before + 1
    assert {supervised(tokenizer, row) for row in rows} == {"a number<|im_end|>"}


@given(
    st.lists(WORDS, min_size=2, max_size=4),
    st.sampled_from(["", "<|im_start|>system\nBe kind.<|im_end|>\n", "x\n"]),
)
def test_a_shared_beginning_changes_no_token_and_no_place(
    make_tokenizer: MakeTokenizer, texts: list[str], shared: str
) -> None:
    backend = make_tokenizer(CHATML, **CHATML_TOKENS).backend_tokenizer

    def encodings(asked: Sequence[str]) -> list[Coded]:
        return [Coded(one.ids, one) for one in backend.encode_batch(asked, add_special_tokens=False)]

    beginning = SharedBeginning(cutters_of(backend), encodings)
    beginning.tokens([f"{shared}<|im_start|>user\n{text}" for text in ("one", "other")])
    whole = [f"{shared}<|im_start|>user\n{text}" for text in texts] + texts
    for found, expected in zip(beginning.tokens(whole), encodings(whole), strict=True):
        assert found.ids == expected.ids
        assert found.places() == places_of(expected.places)


def test_rendering_is_that_of_the_tokenizer_itself(make_tokenizer: MakeTokenizer) -> None:
    for template, tokens in ((CHATML, CHATML_TOKENS), (GEMMA, GEMMA_TOKENS), (THINKING, CHATML_TOKENS)):
        tokenizer = make_tokenizer(template, **tokens)
        turns = chat(*ROUNDS).turns
        messages = [turn._asdict() for turn in turns]
        for shown, prompt in ((4, False), (3, True)):
            expected = tokenizer.apply_chat_template(
                messages[:shown], tokenize=False, add_generation_prompt=prompt
            )
            assert ChatTemplate(tokenizer).render([turns[:shown]], prompt=prompt) == [expected]
