"""What `mlora validate --data` is told of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlora_worker.commands.inspect_rows import look
from mlora_worker.commands.stdio import users_store
from mlora_worker.protocol import (
    Dataset,
    DatasetFormat,
    DatasetSpec,
    FailureReason,
    LookAnswer,
    LookQuestion,
    ModelSource,
    Objective,
    StorageAccess,
    TrainingSpec,
)


def ask(model: Path, *rows: tuple[str, str], show: int = 2, **training: int) -> LookAnswer:
    inline = "\n".join(json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in rows)
    return look(
        LookQuestion(
            model=ModelSource(name="org/tiny", uri=model.as_uri()),
            dataset=Dataset(inline=inline or "\n"),
            training=TrainingSpec(max_seq_length=training.get("length", 512)),
            show=show,
        )
    )


def test_counts_lengths_and_the_first_rows_are_told(tiny_model: Path) -> None:
    answer = ask(
        tiny_model, *[("How many?", f"{number} clips " * number) for number in range(1, 40)], ("x", "")
    )
    assert answer.counts is not None
    assert (answer.counts.used, answer.counts.dropped) == (39, {"NoAnswer": 1})
    assert sum(bar.rows for bar in answer.histogram) == 39
    assert answer.histogram[-1].low <= answer.longest < answer.histogram[-1].high
    assert len(answer.histogram) <= 11
    first, _second = answer.shown
    assert [part.learnt for part in first][:2] == [False, True]
    assert "How many?" in first[0].text
    assert first[1].text.startswith("1 clips")


def test_each_part_of_a_pair_says_whose_answer_it_is(tiny_model: Path) -> None:
    pair = {"prompt": "How many?", "chosen": " Two.", "rejected": " Three."}
    answer = look(
        LookQuestion(
            model=ModelSource(name="org/tiny", uri=tiny_model.as_uri()),
            dataset=Dataset(inline=json.dumps(pair), format=DatasetFormat.PREFERENCE),
            training=TrainingSpec(max_seq_length=512),
        )
    )
    ((asked, chosen, again, rejected),) = answer.shown
    assert [part.answer for part in (asked, chosen, again, rejected)] == ["chosen"] * 2 + ["rejected"] * 2
    assert [part.learnt for part in (asked, chosen, again, rejected)] == [False, True] * 2
    assert asked.text == again.text
    assert chosen.text.startswith(" Two.")
    assert rejected.text.startswith(" Three.")


def labelled(
    tiny_model: Path, objective: Objective | None, *labels: bool, held_out: float | None = None
) -> LookAnswer:
    rows = [{"prompt": "How many?", "completion": " Two.", "label": label} for label in labels]
    return look(
        LookQuestion(
            model=ModelSource(name="org/tiny", uri=tiny_model.as_uri()),
            dataset=DatasetSpec(inline="\n".join(map(json.dumps, rows)), held_out=held_out).for_plan(),
            training=TrainingSpec(max_seq_length=512, objective=objective),
        )
    )


def test_answers_say_whether_they_are_desirable_and_how_many_are(tiny_model: Path) -> None:
    answer = labelled(tiny_model, None, True, False, True)
    assert [[part.answer for part in row] for row in answer.shown[:2]] == [
        ["desirable"] * 2,
        ["undesirable"] * 2,
    ]
    assert answer.desirable == 2


def test_answers_of_one_label_are_refused_where_they_shall_be_learnt(tiny_model: Path) -> None:
    kto = Objective.model_validate({"type": "kto"})
    failure = labelled(tiny_model, kto, True, True).failure
    assert failure is not None
    assert failure.message.startswith("all 2 rows have the label true")
    assert labelled(tiny_model, None, True, True).failure is None
    assert labelled(tiny_model, kto, True, False).failure is None


def test_answers_of_one_label_are_refused_where_they_are_held_out(tiny_model: Path) -> None:
    kto = Objective.model_validate({"type": "kto"})
    failure = labelled(tiny_model, kto, *(True, False) * 5, held_out=0.05).failure
    assert failure is not None
    assert failure.message.startswith("all 1 rows of the evaluation have the label")
    assert "a larger dataset.heldOut" in failure.message


def test_what_would_fail_the_task_is_the_answer(tiny_model: Path, tmp_path: Path) -> None:
    failure = ask(tiny_model).failure
    assert failure is not None
    assert failure.reason is FailureReason.NO_TRAINABLE_ROWS
    failure = ask(tmp_path, ("a", "b")).failure
    assert failure is not None
    assert "config.json is missing" in failure.message


def test_rows_longer_than_the_model_takes_are_told_as_the_task_would_be(tiny_model: Path) -> None:
    failure = ask(tiny_model, ("a", "b"), length=513).failure
    assert failure is not None
    assert failure.reason is FailureReason.INVALID_SPEC
    assert "the base model supports at most 512 tokens" in failure.message


def test_rows_that_are_not_there_are_told_as_such(tiny_model: Path, tmp_path: Path) -> None:
    for place, words in ((tmp_path / "none.jsonl", "does not exist"), (tmp_path, "is a folder")):
        answer = look(
            LookQuestion(
                model=ModelSource(name="org/tiny", uri=tiny_model.as_uri()),
                dataset=Dataset(uri=place.as_uri()),
                training=TrainingSpec(),
                show=0,
            )
        )
        assert answer.failure is not None
        assert answer.failure.reason is FailureReason.DATASET_NOT_FOUND
        assert words in answer.failure.message
    absent = ask(tmp_path / "no-model", ("a", "b")).failure
    assert absent is not None
    assert absent.reason is FailureReason.INVALID_SPEC


@pytest.mark.parametrize(
    ("access", "endpoint", "style"),
    [
        ({}, "http://environment:1", "path"),
        ({"endpoint": "http://file:2"}, "http://file:2", "path"),
        ({"endpoint": "http://file:2", "addressing": "virtual"}, "http://file:2", "virtual"),
        ({"accessKey": "k", "secretKey": "s"}, "http://environment:1", "path"),
    ],
)
def test_stores_are_addressed_as_the_files_say_or_else_the_environment(
    monkeypatch: pytest.MonkeyPatch, access: dict[str, str], endpoint: str, style: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://environment:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    store: Any = users_store(StorageAccess.model_validate(access))._of("s3://b/k")  # type: ignore[attr-defined]
    assert store.origin("s3://b/k") == endpoint
    with store._calling("read", "s3://b/k") as client:
        assert client.meta.config.s3["addressing_style"] == style


def test_a_row_that_the_model_cannot_take_is_told_before_it_is_submitted(
    tiny_model: Path, tmp_path: Path
) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 8}))
    failure = ask(tmp_path, ("a", "b")).failure
    assert failure is not None
    assert failure.reason is FailureReason.INVALID_ROW
    assert "embedding has 8 rows" in failure.message
