"""Rows of random tokens that are as long as GSM8K's, without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from bench.rows import GSM8K, Batch
from mlora_worker.data.prepare import IGNORED, TokenRow

# Of the examples with SmolLM2's tokenizer and its chat template; what matters is how lengths scatter.
CHARACTERS_PER_TOKEN = 3.1
TEMPLATE_TOKENS = 30  # before the answer
SHORTEN_TINY = 8


def rows(count: int, vocabulary: int, *, shorter: int = 1) -> list[TokenRow]:
    """The first ``count`` of the examples, which go round; ``shorter`` divides their lengths."""
    examples = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    generator = np.random.default_rng(0)
    made = []
    for index in range(count):
        example = examples[index % len(examples)]
        prompt = (TEMPLATE_TOKENS + _tokens(example["question"])) // shorter
        ids = generator.integers(
            0, vocabulary, prompt + max(2, _tokens(example["answer"]) // shorter), np.int32
        )
        labels = np.full_like(ids, IGNORED)
        labels[prompt - 1 : -1] = ids[prompt:]
        made.append(TokenRow(ids, labels))
    return made


def deal(rows: Sequence[TokenRow], tasks: int) -> Batch:
    """One step of each task, all rows dealt out in order."""
    each = len(rows) // tasks
    return Batch(tuple(tuple(rows[task * each : (task + 1) * each]) for task in range(tasks)))


def _tokens(text: str) -> int:
    return round(len(text) / CHARACTERS_PER_TOKEN)
