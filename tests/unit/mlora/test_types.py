"""The types that ``mlora`` offers are those that a task is made of."""

from __future__ import annotations

import mlora


def test_a_task_is_made_of_the_types_that_are_offered() -> None:
    spec = mlora.LoRATaskSpec(
        base_model="acme/base",
        lora=mlora.LoRASpec(rank=4),
        dataset=mlora.Dataset(inline="{}"),
        training=mlora.TrainingSpec(epochs=2),
        evaluation=mlora.Evaluation(uri="s3://d/eval.jsonl"),
        output=mlora.Output(uri="s3://a/b"),
        storage=mlora.Storage(region="eu-west-1"),
        init_from=mlora.InitFrom(uri="s3://a/earlier"),
    )
    assert spec.dataset.format is None, "the rows tell it"
