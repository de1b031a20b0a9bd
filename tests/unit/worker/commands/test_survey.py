"""The survey answers what `mlora plan` asks, and says by name what does not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlora_worker.commands.survey import survey
from mlora_worker.protocol import (
    Dataset,
    FailureReason,
    LoRAConfig,
    ModelSource,
    StorageAccess,
    SurveyAnswer,
    SurveyQuestion,
    TaskAnswer,
    TaskQuestion,
    TrainingSpec,
)

ROWS = "\n".join(
    json.dumps({"prompt": "How many clips?", "completion": "She sold 24 clips." * times})
    for times in (1, 2, 3)
)


def ask(model: Path, *tasks: TaskQuestion, stages: int = 2, sample: int = 100) -> SurveyAnswer:
    source = ModelSource(name="org/tiny", uri=model.as_uri(), dtype="float32")
    return survey(SurveyQuestion(model=source, stages=stages, sample_rows=sample, tasks=tasks))


def ask_task(model: Path, sample: int = 100, **changes: Any) -> TaskAnswer:
    question: dict[str, Any] = {
        "uid": "t",
        "lora": LoRAConfig(rank=4),
        "dataset": Dataset(inline=ROWS),
        "training": TrainingSpec(max_seq_length=128),
        **changes,
    }
    (answer,) = ask(model, TaskQuestion(**question), sample=sample).tasks
    return answer


def test_rows_that_no_length_was_named_for_are_as_long_as_the_model_takes(tiny_model: Path) -> None:
    """It takes 512 tokens, which is less than what is usual."""
    answer = ask_task(tiny_model, training=TrainingSpec())
    assert answer.failure is None
    assert answer.rows is not None


def test_facts_and_stages_come_from_the_configuration_alone(tiny_model: Path) -> None:
    answer = ask(tiny_model)
    assert answer.facts is not None
    assert answer.facts.layers == 4
    assert [(one.first_layer, one.last_layer) for one in answer.stages] == [(0, 1), (2, 3)]


def test_rows_are_measured_as_they_would_be_trained_on(tiny_model: Path) -> None:
    rows = ask_task(tiny_model).rows
    assert rows is not None
    assert (rows.counts.used, rows.whole) == (3, True)
    assert rows.mean * 3 == pytest.approx(rows.counts.tokens)
    assert 0 < rows.deviation < rows.mean < rows.longest
    cut = ask_task(tiny_model, training=TrainingSpec(max_seq_length=rows.longest - 1)).rows
    assert cut is not None
    assert (cut.longest, cut.counts.truncated) == (rows.longest - 1, 1)


def test_no_more_rows_are_read_than_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(ROWS)
    task = {"dataset": Dataset(uri=file.as_uri()), "storage": StorageAccess()}
    for sample, used, whole in ((2, 2, False), (3, 3, True)):
        rows = ask_task(tiny_model, sample, **task).rows
        assert rows is not None
        assert (rows.counts.rows, rows.whole) == (used, whole)
    assert ask_task(tiny_model, 0, **task).rows is None


@pytest.mark.parametrize(
    ("story", "changes", "reason", "words"),
    [
        (
            "a rank above a module's smaller side",
            {"lora": LoRAConfig(rank=33, target_modules=("k_proj",))},
            FailureReason.INVALID_SPEC,
            r"rank 33 .* k_proj \(64 x 32\): use at most 32",
        ),
        (
            "a module that the model has not",
            {"lora": LoRAConfig(target_modules=("c_attn",))},
            FailureReason.UNKNOWN_TARGET_MODULE,
            "c_attn .* there are q_proj",
        ),
        (
            "rows longer than the model's positions",
            {"training": TrainingSpec(max_seq_length=513)},
            FailureReason.INVALID_SPEC,
            "maxSeqLength is 513, but the base model supports at most 512",
        ),
        (
            "a file that is not there",
            {"dataset": Dataset(uri="file:///nowhere/rows.jsonl"), "storage": StorageAccess()},
            FailureReason.DATASET_NOT_FOUND,
            "nowhere",
        ),
        (
            "rows with other columns",
            {"dataset": Dataset(inline='{"question": "a", "answer": "b"}')},
            FailureReason.INVALID_ROW,
            "prompt",
        ),
    ],
)
def test_a_task_that_would_fail_is_told_why(
    tiny_model: Path, story: str, changes: dict[str, Any], reason: FailureReason, words: str
) -> None:
    answer = ask_task(tiny_model, **changes)
    assert answer.failure is not None, story
    assert answer.failure.reason is reason
    assert re.search(words, answer.failure.message), answer.failure.message


def test_a_store_that_is_not_reached_from_here_is_no_failure(tiny_model: Path) -> None:
    answer = ask_task(
        tiny_model,
        dataset=Dataset(uri="s3://rows/train.jsonl"),
        storage=StorageAccess(endpoint="http://127.0.0.1:9"),
    )
    assert (answer.failure, answer.rows) == (None, None)
    assert answer.unread is not None
    assert "127.0.0.1:9" in answer.unread


@pytest.mark.parametrize(
    ("story", "stages", "config", "words"),
    [
        ("more stages than layers", 5, {}, "5 stages .* 4 decoder layers .* set stages to 4 or less"),
        ("another architecture", 1, {"model_type": "bloom"}, "model type bloom is not supported"),
        ("quantised weights", 1, {"quantization_config": {"quant_method": "awq"}}, "quantised .awq."),
        ("no config", 1, None, "config.json is missing"),
    ],
)
def test_a_model_that_cannot_be_served_so_is_told_why(
    tiny_model: Path, tmp_path: Path, story: str, stages: int, config: dict[str, Any] | None, words: str
) -> None:
    for file in tiny_model.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    if config is not None:
        given = json.loads((tiny_model / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(given | config))
    answer = ask(tmp_path, stages=stages)
    assert answer.failure is not None, story
    assert re.search(words, answer.failure.message), answer.failure.message
    assert answer.facts is None
