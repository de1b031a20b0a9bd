"""The demonstration's comparison: PEFT and the trainer agree on an adapter, and the comparison would see it if not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from examples.compare import compare, trainer_logits
from mlora_worker.coordinator.preparation.expected_tensors import expected_tensors
from mlora_worker.data.prepare import TokenRow
from mlora_worker.model.facts import model_facts
from mlora_worker.model.load import load_stage
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.protocol import LoRAConfig, ModelSource, StorageAccess
from mlora_worker.storage.artifacts.adapter import adapter_config
from mlora_worker.storage.base_model.model_source import ModelFiles
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.stream.targets import targets_of

CPU = torch.device("cpu")


def write_adapter(folder: Path, model: Path, alpha: float) -> Path:
    """An adapter with random weights in every target."""
    folder.mkdir()
    lora = LoRAConfig(rank=4, alpha=alpha, target_modules=("q_proj", "v_proj"))
    targets = targets_of(model_facts(model, 1, torch.float32), lora)
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in expected_tensors(targets).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = adapter_config(lora, "org/tiny", None, lora.target_modules)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_peft_and_the_trainer_agree_and_a_difference_would_show(tiny_model: Path, tmp_path: Path) -> None:
    heldout = tmp_path / "rows.jsonl"
    heldout.write_text(
        "".join(json.dumps({"question": f"What is {i}?", "answer": f"It is {i}."}) + "\n" for i in range(3))
    )
    weak, strong = (write_adapter(tmp_path / str(alpha), tiny_model, alpha) for alpha in (0.5, 4.0))
    result = compare(tiny_model, {"weak": weak, "strong": strong}, heldout, rows=3)
    assert result.rows == 3
    for adapter in result.adapters.values():
        assert adapter.logit_difference < 1e-5
        assert adapter.heldout_loss != result.base_loss

    store = open_store(StorageAccess(), allow_files=True)
    files = ModelFiles(store, ModelSource(name="m", uri=f"file://{tiny_model}", dtype="float32"), tiny_model)
    engine = StageEngine(load_stage(tiny_model, files, 0, 1, torch.float32, CPU))
    row = TokenRow(ids=np.arange(5, 15, dtype=np.int32), labels=np.full(10, -100, np.int32))
    one, other = (trainer_logits(engine, "a", folder, row) for folder in (weak, strong))
    assert (one - other).abs().max() > 1e-2, "the adapter is in what the trainer computes"
