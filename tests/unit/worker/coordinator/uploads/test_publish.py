"""What becomes of the stages' parts at a task's end: an adapter, or a failure that says what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlora_worker.coordinator.preparation.expected_tensors import expected_tensors
from mlora_worker.coordinator.preparation.prepare import BaseModel
from mlora_worker.coordinator.task.outcome import TrainingResult
from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.coordinator.uploads.publish import finished_adapter
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.model.architecture import read_architecture
from mlora_worker.model.facts import facts_of, resolve_targets
from mlora_worker.protocol import (
    AdapterDtype,
    AdapterType,
    DataCounts,
    Dataset,
    LoRAConfig,
    ModelSource,
    StepRecord,
    TaskPlan,
    Training,
)
from mlora_worker.storage.artifacts.adapter import FinishedAdapter, InvalidAdapter
from mlora_worker.storage.artifacts.model_card import model_card
from mlora_worker.stream.planner import TaskLoad
from tests.fixtures.model_options import FAMILY
from tests.fixtures.tiny_model import write_tiny_model

LORA = LoRAConfig(rank=4, target_modules=("q_proj", "v_proj"))
LAST = StepRecord(step=3, loss=0.5, learning_rate=1e-4, grad_norm=1.0, tokens=10)


def plan(**more: Any) -> TaskPlan:
    return TaskPlan(
        uid="a", namespace="n", name="a", base_model="acme/tiny", lora=LORA, dataset=Dataset(inline="{}"),
        training=Training(), output_uri="s3://b/p", **more,
    )  # fmt: skip


PREPARED = PreparedTask(
    (), DataCounts(rows=1, used=1), StepPlan(1, Training()), ("q_proj", "v_proj"), TaskLoad(1, 1)
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    architecture = read_architecture(write_tiny_model(tmp_path_factory.mktemp("base")))
    source = ModelSource(name="acme/tiny", uri="file:///models/tiny", revision="v1")
    return BaseModel(source, architecture, facts_of(architecture, 2, torch.float32))


@pytest.fixture
def parts(base: BaseModel) -> list[dict[str, torch.Tensor]]:
    """Of two stages, each with its layers."""
    shapes = expected_tensors(resolve_targets(base.facts, LORA))
    made: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, shape in shapes.items():
        made[int(name.split(".")[4]) // 2][name] = torch.ones(shape)
    return made


def finish(base: BaseModel, parts: Any, task: TaskPlan | None = None, **more: Any) -> FinishedAdapter:
    outcome = TrainingResult(**{"step": 3, "last": LAST, "updates": 3, **more})
    return finished_adapter(task or plan(), PREPARED, outcome, parts, base)


def test_parts_of_all_stages_become_one_adapter_of_the_whole_model(base: BaseModel, parts: Any) -> None:
    finished = finish(base, parts)
    assert len(finished.tensors) == 4 * 2 * 2
    assert (finished.step, finished.loss) == (3, 0.5)
    assert finished.config["base_model_name_or_path"] == "acme/tiny"
    assert finished.config["revision"] == "v1"


def test_type_and_name_of_the_output_are_those_that_were_asked_for(base: BaseModel, parts: Any) -> None:
    finished = finish(
        base, parts, plan(output_dtype=AdapterDtype.BFLOAT16, base_model_name="Qwen/Qwen2.5-0.5B")
    )
    assert {tensor.dtype for tensor in finished.tensors.values()} == {torch.bfloat16}
    assert finished.config["base_model_name_or_path"] == "Qwen/Qwen2.5-0.5B"
    assert finished.config["revision"] is None


@pytest.mark.parametrize("of_experts", [True, False])
def test_the_type_of_the_base_goes_with_an_adapter_on_experts_alone(
    small_model: Any, of_experts: bool
) -> None:
    architecture = read_architecture(small_model("qwen3_moe", **FAMILY["qwen3_moe"]).folder)
    facts = facts_of(architecture, 1, torch.float32)
    on_experts = {"target_modules": (), "target_parameters": ("experts.gate_up_proj", "experts.down_proj")}
    asked = LORA.model_copy(update=on_experts if of_experts else {})
    parts = [
        {name: torch.ones(shape) for name, shape in expected_tensors(resolve_targets(facts, asked)).items()}
    ]
    base = BaseModel(ModelSource(name="acme/tiny", uri="file:///models/tiny"), architecture, facts)
    finished = finish(base, parts, plan().model_copy(update={"lora": asked}))
    assert finished.base_type == ("qwen3_moe" if of_experts else None)


def test_an_adapter_of_which_a_stage_is_missing_is_refused(base: BaseModel, parts: Any) -> None:
    with pytest.raises(InvalidAdapter, match="8 of 16 tensors missing: "):
        finish(base, parts[:1])


def test_two_stages_cannot_send_the_same_layer(base: BaseModel, parts: Any) -> None:
    with pytest.raises(InvalidAdapter, match="two stages sent base_model"):
        finish(base, [parts[0], parts[0] | parts[1]])


@pytest.mark.parametrize("never", [{"updates": 0}, {"last": None}])
def test_an_adapter_that_never_had_a_loss_is_refused_though_its_weights_look_well(
    base: BaseModel, parts: Any, never: dict[str, Any]
) -> None:
    with pytest.raises(InvalidAdapter, match="no step had a supervised token"):
        finish(base, parts, **never)


def test_weights_that_overflow_in_the_type_of_the_file_are_refused(base: BaseModel, parts: Any) -> None:
    name = next(iter(parts[1]))
    parts[1][name] = parts[1][name] * 1e9
    finish(base, parts)
    with pytest.raises(InvalidAdapter, match=f"1 of 16 tensors not finite: {name}"):
        finish(base, parts, plan(output_dtype=AdapterDtype.FLOAT16))


@pytest.mark.parametrize("kind", ["dora", "vera"])
def test_other_kinds_are_whole_and_their_card_names_them(base: BaseModel, kind: str) -> None:
    """The file of VeRA has its random matrices, too, as no reader should have to make them."""
    more = {"use_dora": True} if kind == "dora" else {"type": AdapterType.VERA}
    lora = LORA.model_copy(update=more)
    made: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, shape in expected_tensors(resolve_targets(base.facts, lora)).items():
        made[int(name.split(".")[4]) // 2][name] = torch.ones(shape)
    task = plan().model_copy(update={"lora": lora})
    finished = finish(base, made, task)
    random = {name: tuple(finished.tensors[name].shape) for name in finished.tensors if name.count(".") == 1}
    sides = {"base_model.vera_A": (4, 64), "base_model.vera_B": (64, 4)}
    assert random == (sides if kind == "vera" else {})
    assert len(finished.tensors) == 4 * 2 * (3 if kind == "dora" else 2) + len(random)
    card = model_card(task=task, config=finished.config, step=3, loss=0.5, data=None)
    assert f"A {'DoRA' if kind == 'dora' else 'VeRA'} adapter for `acme/tiny`" in card
    assert "merge the adapter into its base" in card
    assert "max-lora-rank" not in card
    untrained = [
        part | {name: part[name] * 0 for name in part if name.endswith(("_B.weight", "lambda_b"))}
        for part in made
    ]
    with pytest.raises(InvalidAdapter, match=r"8 of .* tensors all zero"):
        finish(base, untrained, task)
