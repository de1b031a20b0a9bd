"""Going on from another adapter: what fits is cut for the stages, what does not is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from safetensors.torch import load, save

from mlora_worker.coordinator.preparation.expected_tensors import expected_tensors
from mlora_worker.coordinator.preparation.initial import UnfitAdapter, read_initial
from mlora_worker.protocol import FailureReason, LoRAConfig, ModelFacts, ModuleShape
from mlora_worker.storage.artifacts.adapter import adapter_config
from mlora_worker.storage.errors import StorageError
from mlora_worker.stream.targets import targets_of
from tests.fixtures.memory_store import MemoryStore

MOST = 2**20  # bytes

LORA = LoRAConfig(rank=2, alpha=4, target_modules=("q_proj",))
FACTS = ModelFacts(
    hidden_size=6, intermediate_size=8, layers=3, attention_heads=2, vocab_size=20, max_positions=32, dtype_bytes=4,
    modules=(
        ModuleShape(stage=0, name="q_proj", in_features=6, out_features=4, count=2,
                    path="model.layers.*.self_attn.q_proj"),
        ModuleShape(stage=1, name="q_proj", in_features=6, out_features=4, count=1, first_layer=2,
                    path="model.layers.*.self_attn.q_proj"),
    ),
)  # fmt: skip
TARGETS = targets_of(FACTS, LORA)
URI = "s3://adapters/former"


@pytest.fixture
def folder() -> MemoryStore:
    store = MemoryStore()
    tensors = {
        name: torch.full(shape, 0.5, dtype=torch.bfloat16)
        for name, shape in expected_tensors(TARGETS).items()
    }
    store.write(f"{URI}/adapter_model.safetensors", save(tensors))
    store.write(
        f"{URI}/adapter_config.json", json.dumps(adapter_config(LORA, "acme/tiny", None, ["q_proj"])).encode()
    )
    return store


def test_each_stage_gets_its_own_layers_in_float32(folder: MemoryStore) -> None:
    found = read_initial(folder, URI, LORA, TARGETS).state
    parts = {0: found.own} | {stage: load(payload) for stage, payload in found.payloads.items()}
    assert {stage: len(part) for stage, part in parts.items()} == {0: 4, 1: 2}
    assert {int(name.split(".")[4]) for name in parts[1]} == {2}
    assert {tensor.dtype for part in parts.values() for tensor in part.values()} == {torch.float32}


def test_another_file_is_another_start(folder: MemoryStore) -> None:
    first = read_initial(folder, URI, LORA, TARGETS).sha256
    tensors = load(folder.read(f"{URI}/adapter_model.safetensors", MOST))
    folder.write(f"{URI}/adapter_model.safetensors", save({name: t * 2 for name, t in tensors.items()}))
    assert read_initial(folder, URI, LORA, TARGETS).sha256 != first


def test_a_configuration_of_peft_without_our_additions_is_taken(folder: MemoryStore) -> None:
    plain = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4.0,
        "target_modules": ["q_proj"],
        "lora_dropout": 0.3,
    }
    folder.write(f"{URI}/adapter_config.json", json.dumps(plain).encode())
    read_initial(folder, URI, LORA, TARGETS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"r": 8}, r"has r 8, the task 2; they must be the same"),
        ({"lora_alpha": 16}, r"has lora_alpha 16, the task 4"),
        ({"use_rslora": True}, r"has use_rslora true, the task false"),
        ({"use_dora": True}, r"has use_dora true"),
        ({"bias": "all"}, r'has bias "all"'),
        ({"modules_to_save": ["lm_head"]}, r'has modules_to_save \["lm_head"\]'),
        ({"peft_type": "LOHA"}, r'has peft_type "LOHA"'),
        ({"rank_pattern": {"q_proj": 4}}, r"has rank_pattern"),
    ],
)
def test_a_configuration_of_another_shape_is_refused(
    folder: MemoryStore, change: dict[str, Any], told: str
) -> None:
    config = json.loads(folder.read(f"{URI}/adapter_config.json", MOST)) | change
    folder.write(f"{URI}/adapter_config.json", json.dumps(config).encode())
    with pytest.raises(UnfitAdapter, match=told) as caught:
        read_initial(folder, URI, LORA, TARGETS)
    assert caught.value.reason is FailureReason.INVALID_SPEC


def _less(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(iter(tensors))]


def _more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"] = torch.ones(2, 6)


def _wider(tensors: dict[str, torch.Tensor]) -> None:
    tensors[next(iter(tensors))] = torch.ones(2, 7)


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[next(iter(tensors))][0, 0] = torch.nan


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_less, "lacks "),
        (_more, "has, and the task's modules do not, .*k_proj"),
        (_wider, "another shape"),
        (_nan, "not finite numbers"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    folder: MemoryStore, damage: Callable[[dict[str, torch.Tensor]], None], told: str
) -> None:
    tensors = load(folder.read(f"{URI}/adapter_model.safetensors", MOST))
    damage(tensors)
    folder.write(f"{URI}/adapter_model.safetensors", save(tensors))
    with pytest.raises(UnfitAdapter, match=told):
        read_initial(folder, URI, LORA, TARGETS)


def test_a_folder_without_an_adapter_is_a_mistake_in_the_spec(folder: MemoryStore) -> None:
    with pytest.raises(StorageError, match=r"s3://adapters/else contains no adapter_config\.json") as caught:
        read_initial(folder, "s3://adapters/else", LORA, TARGETS)
    assert caught.value.reason is FailureReason.INVALID_SPEC


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_far_too_large_is_not_read(folder: MemoryStore, name: str) -> None:
    folder.write(f"{URI}/{name}", bytes(2**21))
    with pytest.raises(UnfitAdapter, match=f"{name} has more bytes than"):
        read_initial(folder, URI, LORA, TARGETS)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "loftq", "corda"])
def test_an_adapter_that_changed_its_base_is_refused(folder: MemoryStore, start: str) -> None:
    config = json.loads(folder.read(f"{URI}/adapter_config.json", MOST))
    folder.write(f"{URI}/adapter_config.json", json.dumps(config | {"init_lora_weights": start}).encode())
    with pytest.raises(UnfitAdapter, match=start):
        read_initial(folder, URI, LORA, TARGETS)


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva"])
def test_an_adapter_that_left_its_base_alone_is_taken(folder: MemoryStore, start: bool | str) -> None:
    config = json.loads(folder.read(f"{URI}/adapter_config.json", MOST))
    folder.write(f"{URI}/adapter_config.json", json.dumps(config | {"init_lora_weights": start}).encode())
    assert read_initial(folder, URI, LORA, TARGETS).state


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[" * 100_000, b"[]"])
def test_a_configuration_that_is_none_is_refused_by_name(folder: MemoryStore, content: bytes) -> None:
    folder.write(f"{URI}/adapter_config.json", content)
    with pytest.raises(
        UnfitAdapter, match=r"adapter_config\.json below s3://adapters/former is not (a )?JSON"
    ):
        read_initial(folder, URI, LORA, TARGETS)


@pytest.mark.parametrize(
    "change",
    [
        {"lora_bias": True},
        {"layer_replication": [[0, 2]]},
        {"target_parameters": ["embed_tokens"]},
        {"trainable_token_indices": [1]},
        {"alora_invocation_tokens": [1, 2]},
        {"use_qalora": True},
        {"something_of_next_year": {"a": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_field_that_may_change_what_an_adapter_computes_is_refused_by_name(
    folder: MemoryStore, change: dict[str, Any]
) -> None:
    config = json.loads(folder.read(f"{URI}/adapter_config.json", MOST))
    folder.write(f"{URI}/adapter_config.json", json.dumps(config | change).encode())
    with pytest.raises(UnfitAdapter, match=next(iter(change))):
        read_initial(folder, URI, LORA, TARGETS)


def test_weights_of_linear_modules_and_experts_among_its_parameters_are_taken(folder: MemoryStore) -> None:
    """So PEFT knows experts, and modules that share a name with them; which they are, the tensors' names say."""
    config = json.loads(folder.read(f"{URI}/adapter_config.json", MOST))
    change = {"target_parameters": ["mlp.shared_experts.up_proj.weight", "mlp.experts.down_proj"]}
    folder.write(f"{URI}/adapter_config.json", json.dumps(config | change).encode())
    assert read_initial(folder, URI, LORA, TARGETS)


def test_every_field_that_todays_peft_writes_by_default_is_taken(folder: MemoryStore) -> None:
    theirs = PeftLoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=["q_proj"]).to_dict()
    theirs = {name: sorted(value) if isinstance(value, set) else value for name, value in theirs.items()}
    folder.write(f"{URI}/adapter_config.json", json.dumps(theirs).encode())
    read_initial(folder, URI, LORA, TARGETS)


def test_a_dora_adapter_goes_on_as_one_and_as_nothing_else() -> None:
    lora = LORA.model_copy(update={"use_dora": True})
    targets, store = targets_of(FACTS, lora), MemoryStore()
    tensors = {name: torch.full(shape, 0.5) for name, shape in expected_tensors(targets).items()}
    store.write(f"{URI}/adapter_model.safetensors", save(tensors))
    config = adapter_config(lora, "acme/tiny", None, ["q_proj"])
    store.write(f"{URI}/adapter_config.json", json.dumps(config).encode())
    found = read_initial(store, URI, lora, targets).state
    assert sum(name.endswith("lora_magnitude_vector") for name in found.own) == 2
    assert sum(name.endswith("lora_magnitude_vector") for name in load(found.payloads[1])) == 1
    with pytest.raises(UnfitAdapter, match="has use_dora true, the task false"):
        read_initial(store, URI, LORA, TARGETS)
    del tensors[next(name for name in tensors if name.endswith("lora_magnitude_vector"))]
    store.write(f"{URI}/adapter_model.safetensors", save(tensors))
    with pytest.raises(UnfitAdapter, match="lora_magnitude_vector"):
        read_initial(store, URI, lora, targets)
