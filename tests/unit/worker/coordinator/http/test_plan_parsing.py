"""Plans of newer operators."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from mlora_worker.coordinator.http.plan_parsing import parse_plan, without_values
from mlora_worker.protocol import Dataset, LoRAConfig, Plan, StorageAccess, TaskPlan, Training

KEY = "do-not-show"


def task(uid: str) -> TaskPlan:
    return TaskPlan(
        uid=uid, namespace="n", name=uid, base_model="m", lora=LoRAConfig(), dataset=Dataset(inline="{}"),
        training=Training(), output_uri="s3://b/p",
        storage=StorageAccess.model_validate({"accessKey": "k", "secretKey": KEY}),
    )  # fmt: skip


def body(plan: Plan, **changes: dict[str, Any]) -> bytes:
    """The plan, with changes of its tasks by uid."""
    raw = json.loads(plan.to_json())
    raw["tasks"] = [{**one, **changes.get(one["uid"], {})} for one in raw["tasks"]]
    return json.dumps(raw).encode()


PLAN = Plan(generation=3, tasks=(task("a"), task("b"), task("c")))


def test_a_plan_comes_through_as_it_is() -> None:
    found = parse_plan(PLAN.to_json().encode())
    assert found.plan == PLAN
    assert not found.unsupported


def test_what_one_task_says_beyond_is_left_out_and_named() -> None:
    found = parse_plan(body(PLAN, b={"sparsity": 0.5, "training": {"kind": "dense"}}))
    assert found.plan == Plan(generation=3, tasks=(task("a"), task("c")))
    assert found.unsupported == {"b": "training.kind: unknown field; sparsity: unknown field"}


def test_a_value_that_is_not_known_is_named_without_showing_any() -> None:
    found = parse_plan(body(PLAN, b={"outputDtype": "float4", "storage": {"accessKey": [KEY]}}))
    assert found.plan == Plan(generation=3, tasks=(task("a"), task("c")))
    assert "outputDtype: " in found.unsupported["b"]
    assert KEY not in found.unsupported["b"]


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (b"no json", ": "),
        (b"[]", ": "),
        (b'{"generation": 1, "tasks": "all"}', "tasks: "),
        (b'{"generation": 1, "tasks": [], "newer": 1}', "newer: unknown field"),
        (b'{"generation": "1", "tasks": []}', "generation: "),
        (b'{"generation": 1, "tasks": [{"uid": ""}]}', "tasks.0.uid: "),
        (b'{"generation": 1, "tasks": [{"uid": "a", "name": 3}]}', "tasks.0.name: "),
        (b'{"generation": 1, "tasks": [7]}', "tasks.0: "),
    ],
)
def test_what_concerns_more_than_one_known_task_is_refused(wrong: bytes, where: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse_plan(wrong)
    assert where in without_values(caught.value)
