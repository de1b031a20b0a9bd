"""Of a model that also reads images, the text part alone is read and trained, under the names of the whole model."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mlora_worker.model.attention import PackedRows
from mlora_worker.model.facts import model_facts, resolve_targets, stage_shapes
from mlora_worker.model.load import load_stage
from mlora_worker.model.text_part import TEXT_PARTS
from mlora_worker.protocol import LoRAConfig, Training
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, WEIGHTS_NAME, adapter_config
from mlora_worker.stream.targets import published_names
from tests.equivalence.tasks import Base, Task, engines_of, start_of
from tests.fixtures.model_options import FAMILY, TARGETS, VARIANTS

CPU = torch.device("cpu")
ROWS = PackedRows((4, 7), CPU)
IDS = torch.randint(3, 97, (ROWS.tokens,), generator=torch.Generator().manual_seed(1))
KINDS = [*sorted(TEXT_PARTS), "gemma4 of experts", "gemma4, keys shared"]
RANKS = {"v_proj": 3, "shared_expert_gate": 1}


def small(small_model: Any, kind: str) -> Any:
    model_type, options = VARIANTS.get(kind, (kind, FAMILY.get(kind, {})))
    return small_model(model_type, **({"num_hidden_layers": 4} | options))


class Files:
    """The tensors of a folder, as they are stored; remembers which were read."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
        self.read = set[str]()

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def tensor(self, name: str) -> Tensor:
        self.read.add(name)
        return self.tensors[name]


@torch.no_grad()
def logits(folder: Path, source: Any, stages: int = 2) -> Tensor:
    hidden = torch.empty(0)
    for index in range(stages):
        stage = load_stage(folder, source, index, stages, torch.float32, CPU)
        hidden = stage.run_layers(stage.embed(IDS, ROWS) if stage.first else hidden, ROWS)
    return stage.logits(hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_of_the_files_that_transformers_writes_the_text_parts_tensors_alone_are_read(
    small_model: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved = small(small_model, kind)
    saved.model.save_pretrained(saved.folder)
    files = Files(saved.folder)
    model = AutoModelForImageTextToText.from_pretrained(saved.folder, attn_implementation="eager")
    with torch.no_grad():
        wanted = torch.cat(
            [model(input_ids=row[None]).logits[0] for row in torch.split(IDS, list(ROWS.lengths))]
        )
    torch.testing.assert_close(logits(saved.folder, files), wanted, rtol=1e-5, atol=1e-5)
    unread = {name for name in files.names() if name not in files.read}
    assert unread
    towers = (
        "vision_tower",
        "vision_model",
        "multi_modal_projector",
        "image_newline",
        "visual",
        "embed_vision",
        "audio_tower",
        "embed_audio",
    )
    assert all(name.removeprefix("model.").startswith(towers) for name in unread)
    assert "do not belong" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen2_5_vl", {"model.language_model.": "model.", "model.visual.": "visual."}),
        ("mistral3", {
            "model.language_model.": "language_model.model.", "model.": "", "lm_head": "language_model.lm_head",
        }),
    ],
)  # fmt: skip
def test_names_that_files_had_before_are_found(small_model: Any, kind: str, names: dict[str, str]) -> None:
    saved = small(small_model, kind)

    class Renamed:
        def __init__(self) -> None:
            self.stored = {self.former(name): name for name in saved.names()}

        def former(self, name: str) -> str:
            for now, before in names.items():
                if name.startswith(now):
                    return before + name.removeprefix(now)
            return name

        def names(self) -> Collection[str]:
            return self.stored.keys()

        def tensor(self, name: str) -> Tensor:
            found: Tensor = saved.tensor(self.stored[name])
            return found

    assert not any("model.language_model." in name for name in Renamed().names())
    torch.testing.assert_close(logits(saved.folder, Renamed()), logits(saved.folder, saved), rtol=0, atol=0)


def test_what_belongs_to_no_part_of_the_model_is_named_in_the_log(
    small_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saved = small(small_model, "qwen3_vl")
    saved.model.save_pretrained(saved.folder)
    files = Files(saved.folder)
    files.tensors["mtp.norm.weight"] = torch.ones(3)
    logits(saved.folder, files)
    assert "1 stored tensors do not belong to a model of type qwen3_vl and are ignored: mtp.norm.weight" in (
        caplog.text
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stage_takes_is_the_text_parts(small_model: Any, kind: str) -> None:
    saved = small(small_model, kind)
    (shape,) = stage_shapes(saved.folder, 1, torch.float32)
    text = [p for name, p in saved.model.named_parameters() if "language_model" in name or "lm_head" in name]
    scales = (
        "embed_tokens.embed_scale", "embed_tokens_per_layer.embed_scale", "layer_scalar", "router_input_scale",
        "per_layer_projection_scale", "per_layer_input_scale", "e_score_correction_bias",
    )  # fmt: skip
    text += [buffer for name, buffer in saved.model.named_buffers() if name.endswith(scales)]
    assert shape.parameters == sum(p.numel() for p in text)
    assert shape.parameters < sum(p.numel() for p in saved.model.parameters())


def adapted(model: Any) -> set[str]:
    return {
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_adapter_loads_into_the_whole_model_with_no_key_too_many_and_none_missing(
    small_model: Any, tmp_path: Path, kind: str
) -> None:
    saved = small(small_model, kind)
    facts = model_facts(saved.folder, 2, torch.float32)
    there = {shape.name for shape in facts.modules}
    own = {name: rank for name, rank in RANKS.items() if name in there}
    refused = facts.never_adapted or any(stack.in_peft for stack in facts.experts or ())
    asked = TARGETS[kind] if refused else ("all-linear",)
    lora = LoRAConfig(rank=2, alpha=4, target_modules=asked, rank_pattern=own)
    targets = resolve_targets(facts, lora)
    config = adapter_config(lora, "org/tiny", None, published_names(facts, targets, is_part=True))
    (tmp_path / "adapter").mkdir()
    tensors = start_of(engines_of(Base(saved.folder, saved.model), 2), Task("t", lora, Training(), [], 1))
    save_file(tensors, tmp_path / "adapter" / WEIGHTS_NAME)
    (tmp_path / "adapter" / CONFIG_NAME).write_text(json.dumps(config))
    model = PeftModel.from_pretrained(copy.deepcopy(saved.model), str(tmp_path / "adapter"))
    assert adapted(model) == {target.path for target in targets}
    found = model.load_adapter(str(tmp_path / "adapter"), "default")
    assert not found.unexpected_keys
    assert not [name for name in found.missing_keys if "lora_" in name]
    inside = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    assert len(inside) == len(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(inside[name.replace(".weight", ".default.weight")], tensor)


def test_names_choose_the_text_part_alone_and_patterns_what_they_choose_in_peft(small_model: Any) -> None:
    """PEFT would adapt the towers, too, for a bare name and for all-linear."""
    saved = small(small_model, "gemma3")
    facts = model_facts(saved.folder, 2, torch.float32)

    def ours(*words: str) -> set[str]:
        return {one.path for one in resolve_targets(facts, LoRAConfig(rank=2, target_modules=words))}

    def theirs(words: Any) -> set[str]:
        config = LoraConfig(r=2, target_modules=words, task_type="CAUSAL_LM")
        return adapted(get_peft_model(copy.deepcopy(saved.model), config))

    pattern = r"model\.language_model\.layers\.[0-1]\..*\.(q|v)_proj"
    assert ours(pattern) == theirs(pattern)
    path = "language_model.layers.3.mlp.up_proj"
    assert ours(path) == theirs([path])
    for mine, peft in (("q_proj", ["q_proj"]), ("all-linear", "all-linear")):
        towers = theirs(peft) - ours(mine)
        assert ours(mine) < theirs(peft)
        assert all("vision_tower" in one for one in towers)
