"""The rules beyond the schema, in their Python form; tests/integration/test_crds.py has the API server's."""

from __future__ import annotations

from typing import Any

import pytest

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.rules import PIPELINE_RULES, TASK_RULES, broken
from mlora_operator.api.task import LoRATaskSpec


def task(**parts: Any) -> dict[str, Any]:
    spec = {
        "baseModel": "m",
        "dataset": {"uri": "s3://data/a.jsonl"},
        "output": {"uri": "s3://adapters/a"},
        **parts,
    }
    return LoRATaskSpec.model_validate(spec).model_dump(mode="json", by_alias=True, exclude_none=True)


def pipeline(**parts: Any) -> dict[str, Any]:
    spec = {"model": {"name": "m", "uri": "s3://models/m"}, **parts}
    return LoRAPipelineSpec.model_validate(spec).model_dump(mode="json", by_alias=True, exclude_none=True)


GOOD_TASKS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all-linear alone": {"lora": {"targetModules": ["all-linear"]}},
    "warm-up as long as the run": {"training": {"maxSteps": 10, "warmupSteps": 10}},
    "warm-up with epochs": {"training": {"warmupSteps": 10}},
    "warm-up as a fraction": {"training": {"maxSteps": 10, "warmupRatio": 0.5}},
    "evaluation on rows of its own": {"evaluation": {"uri": "s3://data/b.jsonl"}},
    "evaluation on rows held out": {
        "evaluation": {"everySteps": 5},
        "dataset": {"uri": "s3://data/a.jsonl", "heldOut": 0.1},
    },
    "experts alone": {
        "lora": {"targetModules": [], "targetParameters": ["experts.down_proj"], "useRslora": True}
    },
    "experts with LoRA+": {"lora": {"targetParameters": ["experts.down_proj"], "loraplusLrRatio": 4}},
    "DoRA": {"lora": {"useDora": True, "useRslora": True, "loraplusLrRatio": 4}},
    "VeRA": {"lora": {"type": "vera", "rank": 256, "dropout": 0.1, "dInitial": 0.2}},
    "Lion with its own betas": {"training": {"optimizer": {"type": "lion", "beta1": 0.95, "beta2": 0.98}}},
    "pairs whose format the rows tell": {"training": {"objective": {"type": "dpo"}}},
    "pairs of a named format": {
        "training": {"objective": {"type": "simpo", "labelSmoothing": 0.1}},
        "dataset": {"uri": "s3://data/a.jsonl", "format": "preference"},
    },
    "answers with labels": {
        "training": {"objective": {"type": "kto", "desirableWeight": 1.33}},
        "dataset": {"uri": "s3://data/a.jsonl", "format": "unpairedPreference"},
    },
    "an estimate from rows of several mini-batches": {
        "training": {"objective": {"type": "kto"}, "batchSize": 1, "gradientAccumulationSteps": 2},
    },
    "answers with labels and another adapter": {
        "training": {"objective": {"type": "kto", "lossType": "apo_zero_unpaired"}, "batchSize": 1},
        "initFrom": {"uri": "s3://adapters/former"},
    },
    "a prompt that is called as another format's column": {
        "dataset": {"uri": "s3://data/a.jsonl", "fields": {"prompt": "chosen"}},
    },
    "an output deep in a bucket": {"output": {"uri": "s3://adapters/team/a/"}},
    "inline rows": {"dataset": {"inline": '{"prompt": "a", "completion": "b"}'}},
}

OBJECTIVE_OF: dict[str, dict[str, Any]] = {
    "preference": {"type": "dpo"},
    "unpairedPreference": {"type": "kto", "lossType": "apo_zero_unpaired"},
}
BAD_TASKS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a whole bucket": ({"output": {"uri": "s3://adapters"}}, "output.uri", "a prefix below the bucket"),
    "a whole bucket with a slash": ({"output": {"uri": "s3://adapters/"}}, "output.uri", "below the bucket"),
    "two chat templates": (
        {
            "dataset": {
                "uri": "s3://data/a.jsonl",
                "chatTemplate": "x",
                "chatTemplateRef": {"name": "a", "key": "b"},
            }
        },
        "dataset",
        "only one of chatTemplate and chatTemplateRef",
    ),
    "a chat template for a text": (
        {"dataset": {"uri": "s3://data/a.jsonl", "format": "text", "chatTemplate": "x"}},
        "dataset",
        "remove chatTemplate",
    ),
    "all-linear beside a name": (
        {"lora": {"targetModules": ["q_proj", "all-linear"]}},
        "lora",
        "only entry",
    ),
    "warm-up longer than the run": (
        {"training": {"maxSteps": 10, "warmupSteps": 11}},
        "training",
        "warmupSteps must not be more than maxSteps",
    ),
    "pairs without an objective": (
        {"dataset": {"uri": "s3://data/a.jsonl", "format": "preference"}},
        "",
        "training.objective.type must be dpo",
    ),
    "an objective of pairs for chats": (
        {
            "training": {"objective": {"type": "orpo"}},
            "dataset": {"uri": "s3://data/a.jsonl", "format": "messages"},
        },
        "",
        "with a chosen and a rejected answer (preference): remove dataset.format, or correct it",
    ),
    "an estimate from one row": (
        {"training": {"objective": {"type": "kto"}, "batchSize": 1}},
        "training",
        "raise batchSize or gradientAccumulationSteps, or set lossType apo_zero_unpaired",
    ),
    "an estimate against an adapter": (
        {"training": {"objective": {"type": "kto"}}, "initFrom": {"uri": "s3://adapters/former"}},
        "",
        "set lossType apo_zero_unpaired, or remove initFrom",
    ),
    "labels without an objective": (
        {"dataset": {"uri": "s3://data/a.jsonl", "format": "unpairedPreference"}},
        "",
        "those of unpairedPreference have one with a label: it must be kto",
    ),
    "an objective of labels for pairs": (
        {
            "training": {"objective": {"type": "kto", "lossType": "apo_zero_unpaired"}},
            "dataset": {"uri": "s3://data/a.jsonl", "format": "preference"},
        },
        "",
        "training.objective.type kto takes rows with one answer and a label",
    ),
    "a part of pairs": (
        {
            "training": {"objective": {"type": "cpo"}},
            "dataset": {"uri": "s3://data/a.jsonl", "trainOn": "lastAnswer"},
        },
        "",
        "remove dataset.trainOn",
    ),
    **{
        f"one column for two of {format or 'a format that rows tell'}: {fields}": (
            {
                "dataset": {"uri": "s3://data/a.jsonl", "fields": fields}
                | ({"format": format} if format else {})
            }
            | ({"training": {"objective": OBJECTIVE_OF[named]}} if named in OBJECTIVE_OF else {}),
            "dataset",
            f"of format {named}, fields {columns} must each name another column",
        )
        for format, named, fields, columns in (
            ("preference", "preference", {"rejected": "chosen"}, "chosen, rejected, prompt"),
            (None, "preference", {"rejected": "chosen"}, "chosen, rejected, prompt"),
            ("preference", "preference", {"prompt": "rejected"}, "chosen, rejected, prompt"),
            (
                "promptCompletion",
                "promptCompletion",
                {"prompt": "a", "completion": "a"},
                "prompt, completion",
            ),
            ("unpairedPreference", "unpairedPreference", {"label": "prompt"}, "prompt, completion, label"),
            (None, "unpairedPreference", {"label": "prompt"}, "prompt, completion, label"),
            (None, "promptCompletion", {"completion": "prompt"}, "prompt, completion"),
            ("sharegpt", "sharegpt", {"system": "conversations"}, "conversations, system"),
            ("alpaca", "alpaca", {"input": "output"}, "instruction, output, input, system"),
        )
    },
    "moments of 8 bits": (
        {"training": {"optimizer": {"type": "adamw8bit"}}},
        "training",
        "optimizer.type must be adamw or lion",
    ),
    "an epsilon for Lion": (
        {"training": {"optimizer": {"type": "lion", "epsilon": 1e-6}}},
        "training",
        "lion has no epsilon: remove it",
    ),
    **{
        f"a start by {start}": (
            {"lora": {"initLoraWeights": start}},
            "lora",
            "initLoraWeights must be default, gaussian or orthogonal",
        )
        for start in ("pissa", "olora", "eva", "corda", "loftq")
    },
    **{
        f"an orthogonal start of {name} that is odd": (
            {"lora": {"initLoraWeights": "orthogonal", name: value}},
            "lora",
            "initLoraWeights orthogonal needs even ranks",
        )
        for name, value in {"rank": 7, "rankPattern": {"q_proj": 4, "v_proj": 5}}.items()
    },
    "DoRA with dropout": (
        {"lora": {"useDora": True, "dropout": 0.1}},
        "lora",
        "set dropout to 0, or remove useDora",
    ),
    "no module": ({"lora": {"targetModules": []}}, "lora", "targetModules must name"),
    **{
        f"experts with {name}": (
            {"lora": {"targetParameters": ["experts.down_proj"], name: value}},
            "lora",
            "targetParameters needs type lora, dropout 0, no useDora",
        )
        for name, value in {
            "dropout": 0.1,
            "useDora": True,
            "type": "vera",
            "initLoraWeights": "orthogonal",
        }.items()
    },
    "experts of some layers": (
        {"lora": {"targetParameters": ["experts.down_proj"], "layersToTransform": [1]}},
        "lora",
        "name the layers there",
    ),
    **{
        f"VeRA with {name}": ({"lora": {"type": "vera", name: value}}, "lora", "type vera has rank, dropout")
        for name, value in {
            "alpha": 16,
            "rankPattern": {"q_proj": 4},
            "alphaPattern": {"q_proj": 4},
            "useRslora": True,
            "useDora": True,
            "initLoraWeights": "gaussian",
            "loraplusLrRatio": 2,
        }.items()
    },
    "a start of vectors without any": ({"lora": {"dInitial": 0.2}}, "lora", "only with type vera"),
    "two warm-ups": (
        {"training": {"warmupSteps": 1, "warmupRatio": 0.5}},
        "training",
        "only one of warmupSteps and warmupRatio can be set",
    ),
}

BAD_PIPELINES: dict[str, tuple[dict[str, Any], str]] = {
    "a data set for a base model": (
        {"model": {"name": "m", "uri": "hf://datasets/acme/rows"}},
        "must not name a data set: write hf://OWNER/NAME",
    ),
    "Selector without labels": ({"allowedNamespaces": {"from": "Selector"}}, "needs at least one label"),
    "Selector with no label": (
        {"allowedNamespaces": {"from": "Selector", "selector": {}}},
        "needs at least one label",
    ),
    "labels without Selector": (
        {"allowedNamespaces": {"from": "All", "selector": {"team": "a"}}},
        "requires from: Selector",
    ),
}


@pytest.mark.parametrize("case", GOOD_TASKS)
def test_a_good_task_breaks_no_rule(case: str) -> None:
    assert list(broken(task(**GOOD_TASKS[case]), TASK_RULES)) == []


@pytest.mark.parametrize("case", BAD_TASKS)
def test_a_bad_task_is_told_where_and_what_to_do(case: str) -> None:
    parts, place, words = BAD_TASKS[case]
    ((path, message),) = broken(task(**parts), TASK_RULES)
    assert path == tuple(filter(None, place.split(".")))
    assert words in message


def test_vera_does_not_start_from_another_adapter() -> None:
    spec = task(lora={"type": "vera"}, initFrom={"uri": "s3://adapters/b"})
    assert list(broken(spec, TASK_RULES)) == [
        ((), "initFrom cannot be used with lora.type vera: remove it"),
    ]


def test_an_evaluation_without_rows_is_told_where_to_get_them() -> None:
    ((path, message),) = broken(task(evaluation={"everySteps": 5}), TASK_RULES)
    assert path == ()
    assert message == "evaluation needs rows: set evaluation.uri, or dataset.heldOut"


@pytest.mark.parametrize("case", BAD_PIPELINES)
def test_a_bad_pipeline_is_told_what_to_do(case: str) -> None:
    parts, words = BAD_PIPELINES[case]
    ((_, message),) = broken(pipeline(**parts), PIPELINE_RULES)
    assert words in message


def test_good_pipelines_break_no_rule() -> None:
    for allowed in ({}, {"from": "All"}, {"from": "Selector", "selector": {"team": "a"}}):
        assert list(broken(pipeline(allowedNamespaces=allowed), PIPELINE_RULES)) == []


def test_all_of_a_tasks_spec_but_whose_turn_it_is_and_its_times_is_immutable() -> None:
    frozen = {rule.path[0] for rule in TASK_RULES if "oldSelf" in rule.cel and rule.path}
    everything = {field.alias for field in LoRATaskSpec.model_fields.values()}
    times = {"startDeadlineSeconds", "activeDeadlineSeconds", "ttlSecondsAfterFinished"}
    assert everything - frozen == {"priority", "suspend"} | times
