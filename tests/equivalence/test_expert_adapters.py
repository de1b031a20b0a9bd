"""Adapters on routed experts equal PEFT's on the same parameters (``target_parameters``), whatever is beside them.

PEFT adds ``B A`` to the whole parameter before the experts run; here each expert's product is added to the rows that chose
it. So what is compared is the adapter itself, over steps, and its gradients.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from mlora_operator.memory.model import adapter_bytes
from mlora_worker.commands.merge import merge
from mlora_worker.coordinator.preparation.expected_tensors import expected_tensors
from mlora_worker.coordinator.task.prepared import InitialState
from mlora_worker.frozen.experts import FrozenExperts
from mlora_worker.frozen.int8 import int8
from mlora_worker.frozen.linear import Freeze
from mlora_worker.lora.experts import SegmentAdditions
from mlora_worker.lora.stacked import StackedPair
from mlora_worker.model.architecture import read_architecture
from mlora_worker.model.facts import facts_of, model_facts, resolve_targets
from mlora_worker.protocol import LoRAConfig, MergeQuestion, Training
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, adapter_config, check_adapter, save_weights
from mlora_worker.storage.artifacts.checkpoint import stage_part
from mlora_worker.stream.targets import published_names
from tests.equivalence.mixtures import NF4, wider
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import (
    Base,
    Row,
    Task,
    Trained,
    assert_same,
    engines_of,
    largest_difference,
    train,
)
from tests.equivalence.test_gradients import assert_gradients_are_autograds
from tests.equivalence.test_quantised_experts import quantised_as_plain
from tests.equivalence.test_resume import assert_bit_identical, crash_at, play, whole
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.model_options import EXPERT_TYPES, FAMILY, MIXTURES, TARGETS
from tests.fixtures.threaded import Crashed, ThreadedPipeline

BOTH = ("experts.gate_up_proj", "experts.down_proj")
STEPS = 10
SINGLE_ROWS = Training(
    batch_size=1, gradient_accumulation_steps=2, learning_rate=5e-3, warmup_steps=2, max_grad_norm=1.0, seed=3
)
AT_ONCE = SINGLE_ROWS.model_copy(update={"warmup_steps": 0})


def lora(model_type: str, **options: Any) -> LoRAConfig:
    attention = ("o_proj",) if model_type in TARGETS else ("q_proj", "v_proj")
    return LoRAConfig(
        **{"target_modules": attention, "target_parameters": BOTH, "rank": 3, "alpha": 6, **options}
    )


def made(small_model: Callable[..., Any], model_type: str, **options: Any) -> Base:
    saved = small_model(model_type, **(FAMILY[model_type] | options))
    return Base(saved.folder, saved.model)


def published(base: Base, asked: LoRAConfig, folder: Path, trained: Trained) -> LoraConfig:
    architecture = read_architecture(base.folder)
    facts = facts_of(architecture, 1, torch.float32)
    names = published_names(facts, resolve_targets(facts, asked), is_part=architecture.is_part)
    check_adapter(trained.adapter, expected_tensors(resolve_targets(facts, asked)))
    save_weights(trained.adapter, folder)
    (folder / CONFIG_NAME).write_text(json.dumps(adapter_config(asked, "tiny", None, names)))
    config = LoraConfig.from_pretrained(folder)
    config.inference_mode = False
    return config  # type: ignore[no-any-return]


@pytest.mark.parametrize("model_type", MIXTURES)
def test_ten_steps_equal_peft_on_one_two_and_three_stages_and_the_adapter_loads_there(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], tmp_path: Path, model_type: str
) -> None:
    base, asked = made(small_model, model_type), lora(model_type)
    task = Task("t", asked, SINGLE_ROWS, rows(11, 1, longest=16, vocabulary=97), STEPS)
    neighbour = Task("n", lora(model_type, rank=2), AT_ONCE, rows(4, 2, longest=20, vocabulary=97), 4)
    each = [train(base, stages, [task, neighbour])["t"] for stages in (1, 2, 3)]
    config = published(base, asked, tmp_path, each[0])
    assert {name.rpartition(".")[2] for name in config.target_parameters} == {"gate_up_proj", "down_proj"}
    theirs = train_with_peft(base, task, each[0].start, config=config)
    for ours in each:
        assert_same(ours, theirs, losses=1e-4, weights=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of missing and of unexpected keys
        model = PeftModel.from_pretrained(copy.deepcopy(base.model), tmp_path)
    held = {
        name.replace(".default", ""): tensor for name, tensor in model.named_parameters() if "lora_" in name
    }
    assert held.keys() == each[0].adapter.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in each[0].adapter.items())


FORMS: dict[str, dict[str, Any]] = {
    "down alone": {"target_parameters": ("mlp.experts.down_proj",)},
    "gate and up alone, no modules": {"target_parameters": ("experts.gate_up_proj",), "target_modules": ()},
    "of one layer": {"target_parameters": ("layers.2.mlp.experts.gate_up_proj", "layers.2.mlp.experts.down_proj")},
    "ranks and alphas of their own": {
        "rank_pattern": {"gate_up_proj": 5, "q_proj": 2}, "alpha_pattern": {r".*experts\.down_proj": 9.0},
        "target_modules": ("q_proj",),
    },
    "rsLoRA": {"use_rslora": True},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_twenty_steps_of_other_forms_equal_peft(
    small_model: Callable[..., Any],
    rows: Callable[..., list[Row]],
    tmp_path: Path,
    form: str,
    model_type: str,
) -> None:
    base, asked = made(small_model, model_type), lora(model_type, **FORMS[form])
    task = Task("t", asked, SINGLE_ROWS, rows(11, 1, longest=16, vocabulary=97), 20)
    ours = train(base, 2, [task])["t"]
    config = published(base, asked, tmp_path, ours)
    assert_same(ours, train_with_peft(base, task, ours.start, config=config), losses=1e-4, weights=1e-4)


@pytest.mark.parametrize("model_type", EXPERT_TYPES)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_plain_autograd(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], model_type: str, recompute: bool
) -> None:
    compare_gradients(made(small_model, model_type), rows, model_type, recompute)


def compare_gradients(
    base: Base, rows: Callable[..., list[Row]], model_type: str, recompute: bool = False
) -> None:
    """Single rows: transformers' eager attention makes NaN of a padded position that a window leaves nothing to look at."""
    asked = lora(model_type)
    training = Training(batch_size=1, gradient_accumulation_steps=4, learning_rate=1e-3, seed=4)
    task = Task("t", asked, training, rows(4, 1, vocabulary=97), 1)
    others = [
        Task("n", lora(model_type, rank=2), training, rows(3, 2, vocabulary=97), 1),
        Task("plain", lora(model_type, target_parameters=()), training, rows(2, 3, vocabulary=97), 1),
    ]
    config = LoraConfig(
        r=asked.rank,
        lora_alpha=asked.alpha,
        target_modules=list(asked.target_modules),
        target_parameters=list(BOTH),
        task_type="CAUSAL_LM",
    )
    assert_gradients_are_autograds(base, task, others, recompute, config, limit=5e-6)


def halves_changed(patch: pytest.MonkeyPatch) -> None:
    plain = FrozenExperts.__init__

    def changed(self: Any, *arguments: Any, **words: Any) -> None:
        plain(self, *arguments, **words)
        self.halves = self.halves[::-1]

    patch.setattr(FrozenExperts, "__init__", changed)


def order_of_files_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StackedPair, "from_files", lambda _: None)


def gradients_through_down_lost(patch: pytest.MonkeyPatch) -> None:
    """To its input alone: gate, up, the router and all layers below."""
    plain = SegmentAdditions.back_of_down

    def without(self: Any, expert: int, x: Any, low: Any, grad: Any, factor: Any, grad_x: Any) -> None:
        plain(self, expert, x, low, grad, factor, grad_x.clone())

    patch.setattr(SegmentAdditions, "back_of_down", without)


def gradients_through_gate_and_up_lost(patch: pytest.MonkeyPatch) -> None:
    plain = SegmentAdditions.back_of_gate_up

    def without(self: Any, *arguments: Any) -> None:
        plain(self, *arguments[:-1], None)

    patch.setattr(SegmentAdditions, "back_of_gate_up", without)


def routers_weights_lost(patch: pytest.MonkeyPatch) -> None:
    plain = SegmentAdditions.back_of_down

    def without(self: Any, expert: int, x: Any, low: Any, grad: Any, factor: Any, grad_x: Any) -> None:
        plain(self, expert, x, low, grad, factor / factor, grad_x)

    patch.setattr(SegmentAdditions, "back_of_down", without)


def one_expert_for_all(patch: pytest.MonkeyPatch) -> None:
    plain = SegmentAdditions.to_down
    patch.setattr(SegmentAdditions, "to_down", lambda self, _, x, y: plain(self, 0, x, y))


@pytest.mark.parametrize(
    "broken",
    [
        halves_changed, order_of_files_lost, gradients_through_down_lost, gradients_through_gate_and_up_lost,
        routers_weights_lost, one_expert_for_all,
    ],
)  # fmt: skip
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_what_is_taken_away_is_noticed(
    small_model: Callable[..., Any],
    rows: Callable[..., list[Row]],
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    broken: Callable[[pytest.MonkeyPatch], None],
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        compare_gradients(made(small_model, model_type), rows, model_type)


TRAINING = Training(batch_size=3, learning_rate=2e-3, seed=5)


@pytest.mark.parametrize(
    ("recompute", "dtype"),
    [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)],
    ids=["float32", "recomputed", "bfloat16"],
)
def test_a_task_has_the_bits_of_itself_alone_beside_any_neighbour(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], recompute: bool, dtype: torch.dtype
) -> None:
    base = wider(small_model)
    own = Task("own", lora("qwen3_moe"), TRAINING, rows(11, 1, vocabulary=97), 3)
    others = [
        Task("attention", lora("qwen3_moe", target_parameters=()), TRAINING, rows(6, 3, vocabulary=97), 3),
        Task("experts", lora("qwen3_moe", rank=5), TRAINING, rows(5, 2, vocabulary=97), 3),
    ]
    for subject in (own, others[0]):
        alone = train(base, 1, [subject], recompute=recompute, dtype=dtype)[subject.name]
        company = [one for one in (own, *others) if one is not subject]
        for tasks in ([company[0], subject], [company[1], subject, company[0]]):
            beside = train(base, 1, tasks, recompute=recompute, dtype=dtype)[subject.name]
            assert beside.microbatches == alone.microbatches
            assert beside.losses == alone.losses
            assert largest_difference(beside.adapter, alone.adapter) == 0.0


@pytest.mark.parametrize("freeze", [NF4, int8], ids=["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_quantised_experts_they_equal_those_on_plain_ones_of_the_same_values_bit_for_bit(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], freeze: Freeze, dtype: torch.dtype
) -> None:
    base = wider(small_model)
    tasks = [
        Task("a", lora("qwen3_moe"), TRAINING, rows(7, 1, vocabulary=97), 4),
        Task("b", lora("qwen3_moe", rank=2), TRAINING, rows(5, 2, vocabulary=97), 4),
    ]
    quantised_as_plain(base, tasks, freeze, dtype)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_task_goes_on_after_a_crash_bit_for_bit(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], stages: int
) -> None:
    base = made(small_model, "qwen3_moe")
    training = Training(batch_size=2, learning_rate=3e-3, weight_decay=0.1, seed=11, checkpoint_every_steps=4)
    task = Task("subject", lora("qwen3_moe", loraplus_lr_ratio=4.0), training, rows(9, 1, vocabulary=97), 10)
    undisturbed = whole(play(base, stages, [task]), task)
    store = MemoryStore()
    first = play(base, stages, [task], store=store, script=crash_at(6, saved=4))
    assert isinstance(first.error, Crashed)
    second = whole(play(base, stages, [task], store=store), task)
    assert second.tasks["subject"].checkpoint.resumed_step == 4
    assert_bit_identical(second, undisturbed, "subject")


@pytest.mark.parametrize("stages", [1, 2])
def test_a_task_that_begins_with_another_adapter_has_its_weights(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], stages: int
) -> None:
    base, asked = made(small_model, "mixtral"), lora("mixtral")
    adapter = train(base, 1, [Task("former", asked, TRAINING, rows(6, 1, vocabulary=97), 4)])[
        "former"
    ].adapter
    still = TRAINING.model_copy(update={"learning_rate": 1e-9, "seed": 77})
    task = Task("next", asked, still, rows(6, 1, vocabulary=97), 1)
    engines = engines_of(base, stages)
    parts = [stage_part(adapter, engine.stage.layer_range) for engine in engines]
    run = task.prepared()
    assert run.prepared is not None
    payloads = {stage: save(part) for stage, part in enumerate(parts) if stage > 0}
    run.prepared = dataclasses.replace(run.prepared, initial=InitialState(parts[0], payloads))
    pipeline = ThreadedPipeline(engines, {"next": run}).run()
    assert pipeline.error is None
    assert largest_difference(pipeline.adapters["next"], adapter) < 1e-5


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "granitemoe", "llama4_text"])
def test_a_merged_model_computes_what_base_and_adapter_compute(
    small_model: Callable[..., Any], rows: Callable[..., list[Row]], tmp_path: Path, model_type: str
) -> None:
    base, asked = made(small_model, model_type), lora(model_type)
    base.model.save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    trained = train(base, 1, [Task("t", asked, TRAINING, rows(6, 1, vocabulary=97), 6)])["t"]
    published(base, asked, tmp_path / "adapter", trained)
    answer = merge(
        MergeQuestion(
            adapter=str(tmp_path / "adapter"), base=str(tmp_path / "base"), output=str(tmp_path / "merged")
        )
    )
    assert answer.failure is None
    ids = torch.tensor([[3, 5, 8, 13, 21, 34]])
    plain = base.model(ids).logits
    wanted = PeftModel.from_pretrained(copy.deepcopy(base.model), tmp_path / "adapter")(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    torch.testing.assert_close(merged, wanted, rtol=1e-4, atol=1e-5)
    assert (wanted - plain).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tasks_bytes_are_those_that_the_memory_model_says(
    small_model: Callable[..., Any], dtype: torch.dtype
) -> None:
    base, asked = made(small_model, "qwen3_moe"), lora("qwen3_moe", rank_pattern={"gate_up_proj": 5})
    facts = model_facts(base.folder, 3, dtype)
    for stage, engine in enumerate(engines_of(base, 3, dtype=dtype)):
        engine.load(Task("t", asked, TRAINING, [], 1).load)
        assert engine.task_bytes("t") == adapter_bytes(asked, facts, stage)
