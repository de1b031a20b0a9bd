from __future__ import annotations

import hashlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load
from transformers import LlamaConfig, LlamaForCausalLM

from mlora_worker.protocol import (
    MANIFEST_NAME,
    AdapterDtype,
    DataCounts,
    EvaluationRecord,
    FailureReason,
    LoRAConfig,
    ModelSource,
    Objective,
    PreferenceRecord,
    StorageAccess,
    TaskPlan,
    Training,
)
from mlora_worker.storage.artifacts.adapter import (
    InvalidAdapter,
    adapter_config,
    as_written,
    check_adapter,
    find_published,
    fingerprint,
    named_base,
    publish_adapter,
    published_info,
    save_weights,
)
from mlora_worker.storage.artifacts.existing_output import MARK_NAME
from mlora_worker.storage.artifacts.model_card import model_card
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.scratch import scratch_folder
from mlora_worker.storage.object_store.store import open_store

OUT = "s3://adapters/team-a/support-bot"
COUNTS = DataCounts(
    rows=10,
    used=9,
    dropped={"NoAnswer": 1},
    first_dropped={"NoAnswer": (4,)},
    tokens=900,
    supervised_tokens=400,
)


def tiny_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
        )
    )


def tensors_for(base: LlamaForCausalLM, rank: int, modules: tuple[str, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, module in base.named_modules():
        if name.rpartition(".")[2] in modules:
            made[f"base_model.model.{name}.lora_A.weight"] = torch.randn(
                rank, module.in_features, generator=generator
            )
            made[f"base_model.model.{name}.lora_B.weight"] = torch.randn(
                module.out_features, rank, generator=generator
            )
    return made


def publish(store: Any, task: TaskPlan, tensors: dict[str, torch.Tensor], uri: str = OUT, **more: Any) -> Any:
    config = adapter_config(task.lora, task.base_model, "v1.2", task.lora.target_modules)
    with scratch_folder(None, "adapter") as folder:
        weights = save_weights(tensors, folder)
        return publish_adapter(
            store, uri, weights, config, **{"task": task, "step": 50, "loss": 0.5, "data": COUNTS, **more}
        )


SMALL = {"q.lora_A.weight": torch.ones(2, 3), "q.lora_B.weight": torch.ones(3, 2)}
SHAPES = {"q.lora_A.weight": (2, 3), "q.lora_B.weight": (3, 2)}


def test_the_published_folder_loads_in_peft_with_every_key_and_value(task: TaskPlan, tmp_path: Path) -> None:
    base = tiny_base()
    tensors = tensors_for(base, task.lora.rank, task.lora.target_modules)
    publish(open_store(StorageAccess(), allow_files=True), task, tensors, tmp_path.as_uri())
    tokens = torch.arange(8)[None]
    plain = base(tokens).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of missing and of unexpected keys
        model = PeftModel.from_pretrained(base, tmp_path)
    result = set_peft_model_state_dict(model, tensors)
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "lora" in key]
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert not torch.allclose(model(tokens).logits, plain)


def test_the_configuration_says_what_peft_and_serving_engines_ask_for(task: TaskPlan, tmp_path: Path) -> None:
    config = adapter_config(task.lora, "acme/tiny", "v1.2", ["v_proj", "q_proj", "v_proj"])
    assert config["peft_type"] == "LORA"
    assert config["task_type"] == "CAUSAL_LM"
    assert config["base_model_name_or_path"] == "acme/tiny"
    assert config["revision"] == "v1.2"
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.1)
    assert isinstance(config["lora_alpha"], int)
    assert (config["inference_mode"], config["bias"], config["modules_to_save"]) == (True, "none", None)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    theirs = LoraConfig.from_pretrained(tmp_path)
    assert (theirs.r, theirs.lora_alpha, theirs.target_modules) == (4, 8, {"q_proj", "v_proj"})


def test_a_fractional_alpha_stays_as_it_is() -> None:
    assert adapter_config(LoRAConfig(alpha=0.5), "a/b", None, ["q"])["lora_alpha"] == 0.5


@pytest.mark.parametrize(("base", "modules"), [(" ", ["q"]), ("a/b", [])])
def test_a_configuration_that_nobody_could_use_is_refused(base: str, modules: list[str]) -> None:
    with pytest.raises(ValueError, match="needs a base model and target modules"):
        adapter_config(LoRAConfig(), base, None, modules)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"q.lora_B.weight": None}, "1 of 2 tensors missing: q.lora_B.weight"),
        ({"k.lora_A.weight": torch.ones(1)}, "1 of 2 tensors unexpected: k.lora_A.weight"),
        ({"q.lora_A.weight": torch.ones(3, 3)}, "1 of 2 tensors of another shape: q.lora_A.weight"),
        (
            {"q.lora_A.weight": torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, float("nan")]])},
            "1 of 2 tensors not finite: q.lora_A.weight",
        ),
        (
            {"q.lora_B.weight": torch.tensor([[1.0, float("-inf")]] * 3)},
            "1 of 2 tensors not finite: q.lora_B.weight",
        ),
        ({"q.lora_B.weight": torch.zeros(3, 2)}, "1 of 2 tensors all zero: q.lora_B.weight"),
        ({"q.lora_B.weight": torch.zeros(3, 2)}, "rows of one or two tokens leave nothing to attention"),
        ({"q.lora_B.weight": torch.zeros(3, 2)}, "leave the module out of lora.targetModules"),
    ],
)
def test_an_adapter_that_is_of_no_use_is_refused_by_name(
    change: dict[str, torch.Tensor | None], told: str
) -> None:
    tensors = {name: value for name, value in {**SMALL, **change}.items() if value is not None}
    with pytest.raises(InvalidAdapter) as caught:
        check_adapter(tensors, SHAPES)
    assert caught.value.reason is FailureReason.INVALID_ADAPTER
    assert told in str(caught.value)


def test_a_good_adapter_passes_even_with_one_zero_in_b() -> None:
    b = torch.ones(3, 2)
    b[0, 0] = 0
    check_adapter({**SMALL, "q.lora_B.weight": b}, SHAPES)


@pytest.mark.parametrize(("value", "flaw"), [(1e6, "not finite"), (1e-12, "all zero")])
def test_what_float16_cannot_hold_is_found_after_the_weights_are_converted(value: float, flaw: str) -> None:
    tensors = {**SMALL, "q.lora_B.weight": torch.full((3, 2), value)}
    check_adapter(as_written(tensors, AdapterDtype.BFLOAT16), SHAPES)
    with pytest.raises(InvalidAdapter, match=f"1 of 2 tensors {flaw}: q.lora_B.weight"):
        check_adapter(as_written(tensors, AdapterDtype.FLOAT16), SHAPES)


@pytest.mark.parametrize("dtype", list(AdapterDtype))
def test_weights_are_written_in_the_type_that_was_asked_for(
    memory: Any, task: TaskPlan, dtype: AdapterDtype
) -> None:
    publish(memory, task, as_written(SMALL, dtype))
    written = load(memory.objects[f"{OUT}/adapter_model.safetensors"])
    assert {str(tensor.dtype) for tensor in written.values()} == {f"torch.{dtype.value}"}


def test_a_base_under_another_name_is_written_without_the_revision_of_the_pipelines_own(
    task: TaskPlan,
) -> None:
    source = ModelSource(name="acme/tiny", uri="file:///models/tiny", revision="v1.2")
    assert named_base(task, source) == ("acme/tiny", "v1.2")
    renamed = task.model_copy(update={"base_model_name": "Qwen/Qwen2.5-0.5B"})
    assert named_base(renamed, source) == ("Qwen/Qwen2.5-0.5B", None)


def test_no_tensors_are_no_adapter() -> None:
    with pytest.raises(InvalidAdapter, match="no tensors"):
        check_adapter({}, {})


def test_of_many_offenders_only_the_first_are_named() -> None:
    with pytest.raises(InvalidAdapter) as caught:
        check_adapter({}, {f"m{number}": (1, 1) for number in range(100, 400)})
    assert "300 of 300 tensors missing: m100, m101, m102, m103, m104, ..." in str(caught.value)


def test_the_old_manifest_goes_first_and_the_new_one_comes_last(memory: Any, task: TaskPlan) -> None:
    publish(memory, task, SMALL)
    assert memory.journal == [
        ("write", MARK_NAME),
        ("delete", MANIFEST_NAME),
        ("write", "adapter_model.safetensors"),
        ("write", "adapter_config.json"),
        ("write", "README.md"),
        ("delete", "chat_template.jinja"),
        ("delete", "history.jsonl"),
        ("write", MANIFEST_NAME),
        ("delete", MARK_NAME),
    ]


@pytest.mark.parametrize("writes", range(9))
def test_a_publication_that_breaks_anywhere_is_no_adapter_and_can_be_repeated(
    memory: Any, task: TaskPlan, writes: int
) -> None:
    publish(memory, task, SMALL)
    memory.writes_left = writes
    with pytest.raises(StorageError):
        publish(memory, task, {name: tensor * 2 for name, tensor in SMALL.items()})
    memory.writes_left = None
    # Up to 1, only the mark was touched: the old adapter is still whole. At 8 the new one is.
    assert (find_published(memory, OUT) is None) is (1 < writes < 8)
    publish(memory, task, SMALL)
    assert find_published(memory, OUT) is not None


def test_what_is_published_already_is_not_taken_back_by_another_try(memory: Any, task: TaskPlan) -> None:
    """The store has written the manifest, and its answer was lost."""
    first = publish(memory, task, SMALL)
    memory.journal.clear()
    assert publish(memory, task, SMALL) == first
    assert memory.journal == [("delete", MARK_NAME)]


@pytest.mark.parametrize("change", ["weights", "spec", "a file is gone"])
def test_what_is_not_this_adapter_is_written_anew(memory: Any, task: TaskPlan, change: str) -> None:
    publish(memory, task, SMALL)
    memory.journal.clear()
    tensors, again = SMALL, task
    match change:
        case "weights":
            tensors = {name: tensor * 2 for name, tensor in SMALL.items()}
        case "spec":
            again = task.model_copy(update={"training": Training(seed=1)})
        case _:
            memory.delete(f"{OUT}/README.md")
    publish(memory, again, tensors)
    assert memory.journal[-2] == ("write", MANIFEST_NAME)


def test_the_manifest_has_the_size_and_sum_of_every_file(memory: Any, task: TaskPlan) -> None:
    info = publish(memory, task, SMALL)
    manifest = find_published(memory, OUT)
    assert manifest is not None
    assert (manifest.task_uid, manifest.step, manifest.loss, manifest.fingerprint) == (
        "uid-1",
        50,
        0.5,
        fingerprint(task),
    )
    assert len(manifest.files) == 3
    for file in manifest.files:
        content = memory.objects[f"{OUT}/{file.name}"]
        assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    weights = memory.objects[f"{OUT}/adapter_model.safetensors"]
    assert (info.uri, info.bytes, info.sha256) == (OUT, len(weights), hashlib.sha256(weights).hexdigest())
    assert info == published_info(OUT, manifest)
    assert all(torch.equal(load(weights)[name], SMALL[name]) for name in SMALL)


@pytest.mark.parametrize("damage", ["gone", "short", "no manifest", "foreign manifest"])
def test_what_is_not_whole_is_not_published(memory: Any, task: TaskPlan, damage: str) -> None:
    publish(memory, task, SMALL)
    weights, manifest = f"{OUT}/adapter_model.safetensors", f"{OUT}/{MANIFEST_NAME}"
    match damage:
        case "gone":
            del memory.objects[weights]
        case "short":
            memory.objects[weights] = memory.objects[weights][:-1]
        case "no manifest":
            del memory.objects[manifest]
        case "foreign manifest":
            memory.objects[manifest] = b'{"files": []}'
    assert find_published(memory, OUT) is None


def change_manifest(memory: Any, **fields: Any) -> None:
    content = json.loads(memory.objects[f"{OUT}/{MANIFEST_NAME}"])
    memory.objects[f"{OUT}/{MANIFEST_NAME}"] = json.dumps(content | fields).encode()


def test_fields_of_a_later_version_are_passed_over_and_its_adapter_stays(memory: Any, task: TaskPlan) -> None:
    info = publish(memory, task, SMALL)
    change_manifest(memory, new={"a": 1})
    memory.journal.clear()
    assert publish(memory, task, SMALL) == info
    assert memory.journal == [("delete", MARK_NAME)]


def test_a_manifest_of_an_unknown_version_is_not_written_over(memory: Any, task: TaskPlan) -> None:
    publish(memory, task, SMALL)
    change_manifest(memory, version=2, files={"weights": "elsewhere"})
    memory.journal.clear()
    with pytest.raises(StorageError, match="format version 2, this worker supports 1"):
        publish(memory, task, {name: tensor * 2 for name, tensor in SMALL.items()})
    assert memory.journal == []


FILE = {"name": "adapter_model.safetensors", "bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "nonsense",
    [
        b"nonsense",
        b"\xff",
        b"[" * 10_000,
        {"step": 10**400},
        {"loss": float("nan")},
        {"files": [FILE | {"bytes": 10**400}]},
        {"files": [FILE | {"sha256": "x" * 100}]},
        {"files": [FILE | {"name": "../other"}, FILE]},
        {"files": [FILE, FILE]},
        {"files": [FILE | {"name": f"file-{number}"} for number in range(1000)]},
        {"files": []},
        {"files": [FILE | {"name": "README.md"}]},
    ],
    ids=["words", "bytes", "depth", "step", "loss", "size", "sum", "outside", "twice", "many", "none", "no weights"],
)  # fmt: skip
def test_a_manifest_that_no_worker_writes_is_none_and_asks_for_nothing(
    memory: Any, task: TaskPlan, nonsense: bytes | dict[str, Any]
) -> None:
    publish(memory, task, SMALL)
    if isinstance(nonsense, bytes):
        memory.objects[f"{OUT}/{MANIFEST_NAME}"] = nonsense
    else:
        change_manifest(memory, **nonsense)
    memory.calls.clear()
    assert find_published(memory, OUT) is None
    assert len(memory.calls) < 5
    publish(memory, task.model_copy(update={"output_overwrite": True}), SMALL)
    assert find_published(memory, OUT) is not None


def test_a_loss_that_is_no_number_leaves_the_manifest_valid(memory: Any, task: TaskPlan) -> None:
    publish(memory, task, SMALL, loss=float("nan"), data=None)
    manifest = find_published(memory, OUT)
    assert manifest is not None
    assert manifest.loss is None


def test_the_model_card_tells_base_data_and_settings_but_no_key(memory: Any, task: TaskPlan) -> None:
    publish(memory, task, SMALL)
    card = memory.objects[f"{OUT}/README.md"].decode()
    assert card.startswith('---\nbase_model: "acme/tiny"\nlibrary_name: peft\n')
    for row in (
        "| rows | 10 |",
        "| rows dropped: NoAnswer | 1 |",
        "| loss of the last step | 0.5 |",
        "| rank | 4 |",
        "| learning rate | 0.0002 |",
    ):
        assert row in card
    assert "## Licence\n\nThis card states no licence." in card
    assert "\nlicense:" not in card, "nobody here can say what it is"
    assert "topsecret" not in str(memory.objects)
    assert "AKIDKEY" not in str(memory.objects)


@pytest.mark.parametrize("decoder", ["model.language_model", "language_model.model"])
def test_the_model_card_of_a_text_part_loads_the_whole_model_and_names_some_of_many_modules(
    task: TaskPlan, decoder: str
) -> None:
    paths = [f"{decoder}.layers.{layer}.self_attn.q_proj" for layer in range(30)]
    card = model_card(
        task=task, config=adapter_config(task.lora, "acme/sees", None, paths), step=1, loss=0.5, data=None
    )
    assert 'base = AutoModelForImageTextToText.from_pretrained("acme/sees")' in card
    assert "and 10 more, in adapter_config.json |" in card


def test_the_model_card_tells_the_scores_of_what_is_published_and_how_to_load_a_pinned_base(
    memory: Any, task: TaskPlan
) -> None:
    scores = EvaluationRecord(step=40, loss=1.5, token_accuracy=0.625, tokens=320)
    publish(memory, task, SMALL, evaluation=scores)
    card = memory.objects[f"{OUT}/README.md"].decode()
    for row in ("| evaluation loss | 1.5 |", "| evaluation token accuracy | 0.625 |", f"| {math.exp(1.5)} |"):
        assert row in card
    assert 'from_pretrained("acme/tiny", revision="v1.2")' in card
    manifest = find_published(memory, OUT)
    assert manifest is not None
    assert manifest.evaluation == scores


def test_the_model_card_of_pairs_tells_what_is_measured_of_them_and_the_numbers_that_hold(
    memory: Any, task: TaskPlan
) -> None:
    def card_of(**objective: Any) -> str:
        training = task.training.model_copy(update={"objective": Objective.model_validate(objective)})
        publish(memory, task.model_copy(update={"training": training}), SMALL, evaluation=scores)
        return str(memory.objects[f"{OUT}/README.md"].decode())

    pairs = PreferenceRecord(
        chosen_reward=0.5,
        rejected_reward=0.25,
        margin=0.25,
        accuracy=0.75,
        chosen_logps=-2,
        rejected_logps=-3,
    )
    scores = EvaluationRecord(step=40, loss=0.6, token_accuracy=0.625, tokens=320, preference=pairs)
    card = card_of(type="dpo")
    for row in (
        "| evaluation loss (of the objective) | 0.6 |",
        "| evaluation margin between chosen and rejected | 0.25 |",
        "| evaluation accuracy (pairs whose chosen answer is preferred) | 0.75 |",
        "| evaluation token accuracy of the chosen answers | 0.625 |",
        "| objective | dpo |\n| objective's beta | 0.1 |\n| objective's loss | sigmoid |",
    ):
        assert row in card
    assert "perplexity" not in card
    assert "None" not in card
    assert "{" not in card.partition("## Adapter and training")[2]
    other = card_of(type="simpo", beta=2.0, cpoAlpha=0.25)
    for row in (
        "| objective's beta | 2.0 |",
        "| weight of the chosen answers' cross entropy | 0.25 |",
        "(gamma) | 0.5 |",
    ):
        assert row in other
    assert "objective's loss" not in other
    answers = card_of(type="kto", desirableWeight=1.5)
    for row in ("| objective's loss | kto |", "| weights of desirable and undesirable answers | 1.5, 1.0 |"):
        assert row in answers


def test_losses_lie_beside_the_weights_and_are_in_the_manifest(memory: Any, task: TaskPlan) -> None:
    publish(memory, task, SMALL, history=b'{"step":1,"loss":2.0}\n')
    assert memory.objects[f"{OUT}/history.jsonl"] == b'{"step":1,"loss":2.0}\n'
    manifest = find_published(memory, OUT)
    assert manifest is not None
    assert "history.jsonl" in [file.name for file in manifest.files]
    publish(memory, task.model_copy(update={"uid": "another", "output_overwrite": True}), SMALL)
    assert f"{OUT}/history.jsonl" not in memory.objects


def test_a_tasks_own_chat_template_lies_beside_the_weights_and_is_part_of_its_work(
    memory: Any, task: TaskPlan
) -> None:
    inline = task.model_copy(update={"dataset": task.dataset.model_copy(update={"chat_template": "{{ a }}"})})
    named = task.model_copy(update={"template_text": "{{ b }}"})
    for one, text in ((inline, b"{{ a }}"), (named, b"{{ b }}")):
        publish(memory, one, SMALL)
        assert memory.objects[f"{OUT}/chat_template.jinja"] == text
        manifest = find_published(memory, OUT)
        assert manifest is not None
        assert "chat_template.jinja" in [file.name for file in manifest.files]
        assert fingerprint(one) != fingerprint(task)
    publish(memory, task, SMALL)
    manifest = find_published(memory, OUT)
    assert manifest is not None
    assert "chat_template.jinja" not in [file.name for file in manifest.files]
    assert f"{OUT}/chat_template.jinja" not in memory.objects, "nobody takes it for this adapter's"


def test_a_fingerprint_is_of_the_work_not_of_its_keys_nor_its_place_in_the_queue(task: TaskPlan) -> None:
    same = task.model_copy(
        update={
            "priority": 9, "admitted": True, "generation": 7,
            "storage": StorageAccess(endpoint="http://other"), "output_overwrite": True,
        }
    )  # fmt: skip
    assert fingerprint(same) == fingerprint(task)
    for change in ({"uid": "uid-2"}, {"lora": LoRAConfig(rank=5)}, {"output_uri": "s3://x/y"}):
        assert fingerprint(task.model_copy(update=change)) != fingerprint(task)


def test_what_the_base_was_quantised_to_stands_in_manifest_and_card(task: TaskPlan, tmp_path: Path) -> None:
    store = open_store(StorageAccess(), allow_files=True)
    publish(store, task, SMALL, tmp_path.as_uri(), quantization="nf4, double")
    assert json.loads((tmp_path / MANIFEST_NAME).read_text())["quantization"] == "nf4, double"
    manifest = find_published(store, tmp_path.as_uri())
    assert manifest is not None
    assert manifest.quantization == "nf4, double"
    card = (tmp_path / "README.md").read_text()
    assert "| base model quantisation | nf4, double |" in card
    assert "It loads on the plain base, too" in card


def test_the_type_of_the_base_stands_in_the_manifest(task: TaskPlan, tmp_path: Path) -> None:
    store = open_store(StorageAccess(), allow_files=True)
    publish(store, task, SMALL, tmp_path.as_uri(), base_type="mixtral")
    assert json.loads((tmp_path / MANIFEST_NAME).read_text())["baseModelType"] == "mixtral"
    manifest = find_published(store, tmp_path.as_uri())
    assert manifest is not None
    assert manifest.base_model_type == "mixtral"


def test_of_a_plain_base_nothing_is_said_that_former_versions_do_not_know(
    task: TaskPlan, tmp_path: Path
) -> None:
    publish(open_store(StorageAccess(), allow_files=True), task, SMALL, tmp_path.as_uri())
    assert not {"quantization", "baseModelType"} & json.loads((tmp_path / MANIFEST_NAME).read_text()).keys()
    assert "quantis" not in (tmp_path / "README.md").read_text()
