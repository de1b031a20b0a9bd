"""Preference training equals TRL's own trainers, beside any neighbours, on any number of stages, after any interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlora_worker.data.prepare import prepare
from mlora_worker.data.training_rows.token_rows import TokenRows
from mlora_worker.protocol import DatasetSpec, LoRAConfig, Objective, Schedule, StorageAccess, Training
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources
from tests.equivalence.tasks import Base, Task, assert_same, random_answers, random_pairs, train
from tests.equivalence.trl_trainers import answers_of_trl, rows_of_trl, train_with_trl
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

STEPS = 20
LORA = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj", "down_proj"))
TRAINING = Training(
    batch_size=4, learning_rate=5e-3, schedule=Schedule.COSINE, warmup_steps=3, weight_decay=0.01, seed=11
)

OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"type": "dpo"},
    "dpo-smoothed": {"type": "dpo", "beta": 0.3, "lossType": "robust", "labelSmoothing": 0.1},
    "dpo-ipo": {"type": "dpo", "lossType": "ipo"},
    "dpo-hinge": {"type": "dpo", "lossType": "hinge", "beta": 0.5},
    "cpo": {"type": "cpo"},
    "cpo-smoothed": {"type": "cpo", "beta": 0.2, "labelSmoothing": 0.1, "cpoAlpha": 0.5},
    "cpo-ipo": {"type": "cpo", "lossType": "ipo"},
    "cpo-hinge": {"type": "cpo", "lossType": "hinge", "cpoAlpha": 0.0},
    "simpo": {"type": "simpo"},
    "simpo-smoothed": {"type": "simpo", "beta": 2.0, "simpoGamma": 1.0, "labelSmoothing": 0.1},
    "orpo": {"type": "orpo"},
    "kto": {"type": "kto"},
    "kto-weighted": {"type": "kto", "beta": 0.5, "desirableWeight": 1.33, "undesirableWeight": 0.7},
    "kto-apo": {"type": "kto", "lossType": "apo_zero_unpaired"},
    "kto-apo-weighted": {
        "type": "kto",
        "lossType": "apo_zero_unpaired",
        "beta": 0.5,
        "desirableWeight": 1.33,
        "undesirableWeight": 0.7,
    },
}


def task(name: str, objective: dict[str, Any], seed: int = 1, **training: Any) -> Task:
    settings = TRAINING.model_copy(update={"objective": Objective.model_validate(objective), **training})
    rows = random_answers(20, seed) if objective["type"] == "kto" else random_pairs(20, seed)
    return Task(name, LORA, settings, rows, STEPS)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_weights_are_those_of_trl(base: Base, name: str, tmp_path: Path) -> None:
    subject = task(name, OBJECTIVES[name])
    ours = train(base, 1, [subject])[name]
    theirs = train_with_trl(base, subject, ours.start, tmp_path)
    assert_same(ours, theirs, losses=1e-4, weights=1e-4)


def test_dora_learns_from_pairs_as_with_trl(base: Base, tmp_path: Path) -> None:
    plain = task("dpo", {"type": "dpo"})
    subject = Task("dpo", LORA.model_copy(update={"use_dora": True}), plain.training, plain.rows, STEPS)
    ours = train(base, 2, [subject])["dpo"]
    theirs = train_with_trl(base, subject, ours.start, tmp_path)
    assert_same(ours, theirs, losses=1e-4, weights=1e-4)


def test_gradient_accumulation_is_that_of_trl(base: Base, tmp_path: Path) -> None:
    subject = task("dpo", {"type": "dpo"}, batch_size=2, gradient_accumulation_steps=2)
    ours = train(base, 1, [subject])["dpo"]
    assert_same(ours, train_with_trl(base, subject, ours.start, tmp_path), losses=1e-4, weights=1e-4)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, ONE, OTHER = turn("user", "2+2?"), turn("assistant", "four"), turn("assistant", "five, no")
ROWS: dict[str, list[dict[str, Any]]] = {
    "texts": [
        {"prompt": "2+2 is", "chosen": " four", "rejected": " five"},
        {"prompt": "A:", "chosen": " b<|im_end|>", "rejected": " c"},
    ],
    "texts with the prompt in them": [{"chosen": "The sum is four.", "rejected": "The sum is nine."}],
    "turns": [
        {"prompt": [ASKED], "chosen": [ONE], "rejected": [OTHER]},
        {"prompt": [turn("system", "Be brief."), ASKED, OTHER, ASKED], "chosen": [ONE], "rejected": [OTHER]},
        {"prompt": [ASKED], "chosen": [ONE, ASKED, ONE], "rejected": [OTHER, ASKED, OTHER]},
    ],
    "turns with the prompt in them": [{"chosen": [ASKED, ONE], "rejected": [ASKED, OTHER]}],
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_become_the_tokens_of_trl(kind: str) -> None:
    tokenizer = tiny_tokenizer(
        CHATML, specials=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    rows = ROWS[kind]
    ours = prepared(rows, tokenizer, {"type": "dpo"})
    theirs = rows_of_trl(rows, tokenizer, TRAINING.max_seq_length)
    assert len(ours) == len(theirs) == len(rows)
    for row, wanted in zip(ours, theirs, strict=True):
        assert row.ids[: row.split].tolist() == wanted["prompt_ids"] + wanted["chosen_ids"]
        assert row.ids[row.split :].tolist() == wanted["prompt_ids"] + wanted["rejected_ids"]
        answers = len(wanted["chosen_ids"]), len(wanted["rejected_ids"])
        labels = row.labels[: row.split], row.labels[row.split :]
        assert tuple(int((own >= 0).sum()) for own in labels) == answers


ANSWERS: dict[str, list[dict[str, Any]]] = {
    "texts": [
        {"prompt": "2+2 is", "completion": " four", "label": True},
        {"prompt": "A:", "completion": " b<|im_end|>", "label": False},
    ],
    "turns": [
        {"prompt": [ASKED], "completion": [ONE], "label": True},
        {"prompt": [turn("system", "Be brief."), ASKED, OTHER, ASKED], "completion": [OTHER], "label": False},
        {"prompt": [ASKED], "completion": [ONE, ASKED, ONE], "label": False},
    ],
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_answers_with_a_label_become_the_tokens_of_trl(kind: str) -> None:
    tokenizer = tiny_tokenizer(
        CHATML, specials=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    found = prepared(ANSWERS[kind], tokenizer, {"type": "kto", "lossType": "apo_zero_unpaired"})
    theirs = answers_of_trl(ANSWERS[kind], tokenizer, TRAINING.max_seq_length)
    assert len(found) == len(theirs) == len(ANSWERS[kind])
    for row, wanted in zip(found, theirs, strict=True):
        assert row.ids.tolist() == wanted["prompt_ids"] + wanted["completion_ids"]
        assert int((row.labels >= 0).sum()) == len(wanted["completion_ids"])
        assert row.desirable is wanted["label"]


def prepared(rows: list[dict[str, Any]], tokenizer: Any, objective: dict[str, Any]) -> TokenRows:
    source = open_sources(open_store(StorageAccess(), allow_files=False), StorageAccess())
    dataset = DatasetSpec(inline="\n".join(map(json.dumps, rows))).for_plan()
    training = TRAINING.model_copy(update={"objective": Objective.model_validate(objective)})
    return prepare(dataset, training, tokenizer, source, 4096).rows
