"""Tiny real tokenizers: byte-level BPE with a few merges, as the models' own are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_CORPUS = [
    "What is two and two? It is four.",
    "the answer to the question\n\n",
    "assistant user system think",
] * 4


def tiny_tokenizer(
    template: str | None, *, specials: list[str], adds_bos: bool = False, **names: str | None
) -> Any:
    """``names`` are eos_token, pad_token, bos_token; ``adds_bos``: the tokenizer itself puts bos first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if adds_bos:
        bos = names["bos_token"]
        assert bos is not None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return tiny_tokenizer
