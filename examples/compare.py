"""What an adapter is worth: loss on held-out rows with and without it, as Hugging Face PEFT computes it.

The adapters are loaded by PEFT, not by this project, and the logits that PEFT gives are held against the trainer's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from mlora_worker.data.prepare import TokenRow, prepare
from mlora_worker.data.tokenizing.tokenizer import load_tokenizer
from mlora_worker.model.load import load_stage
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.protocol import Dataset, DatasetFields, LoRAConfig, ModelSource, StorageAccess, Training
from mlora_worker.storage.base_model.model_source import ModelFiles
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources
from mlora_worker.stream.items import Load, Segment, Train


@dataclass(frozen=True)
class AdapterResult:
    heldout_loss: float  # mean over the answers' tokens
    logit_difference: float  # largest between PEFT and the trainer on the first row, over the largest logit


@dataclass(frozen=True)
class Comparison:
    base_loss: float
    adapters: dict[str, AdapterResult]
    rows: int
    supervised_tokens: int


def compare(model: Path, adapters: Mapping[str, Path], heldout: Path, rows: int) -> Comparison:
    """Losses in float32 on the first ``rows`` rows of ``heldout`` (columns question and answer)."""
    access = StorageAccess()
    store = open_store(access, allow_files=True)
    source = open_sources(store, access)
    dataset = Dataset(
        uri=f"file://{heldout.resolve()}", fields=DatasetFields(prompt="question", completion="answer")
    )
    data = prepare(dataset, Training(max_seq_length=1024), load_tokenizer(model), source, 2048).rows[:rows]
    disable_progress_bar()
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base_loss = mean_loss(base, data)
    names = list(adapters)
    wrapped: Any = PeftModel.from_pretrained(base, str(adapters[names[0]]), adapter_name=names[0])
    for name in names[1:]:
        wrapped.load_adapter(str(adapters[name]), adapter_name=name)
    wrapped.eval()
    files = ModelFiles(store, ModelSource(name="base", uri=f"file://{model}", dtype="float32"), model)
    engine = StageEngine(load_stage(model, files, 0, 1, torch.float32, torch.device("cpu")))
    results = {}
    for name in names:
        wrapped.set_adapter(name)
        own = trainer_logits(engine, name, adapters[name], data[0])
        theirs = logits_of(wrapped, data[0])
        difference = ((theirs - own).abs().max() / theirs.abs().max()).item()
        results[name] = AdapterResult(mean_loss(wrapped, data), difference)
    return Comparison(
        base_loss, results, len(data), sum(int(np.count_nonzero(row.labels >= 0)) for row in data)
    )


@torch.no_grad()
def mean_loss(model: Any, rows: Sequence[TokenRow]) -> float:
    """Mean cross entropy over all supervised tokens of ``rows``."""
    total, count = 0.0, 0
    for row in rows:
        labels = torch.from_numpy(row.labels.astype(np.int64))
        total += cross_entropy(logits_of(model, row), labels, ignore_index=-100, reduction="sum").item()
        count += int((labels >= 0).sum())
    return total / count


@torch.no_grad()
def logits_of(model: Any, row: TokenRow) -> Tensor:
    """[tokens, vocabulary]"""
    logits: Tensor = model(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0]
    return logits


def trainer_logits(engine: StageEngine, name: str, folder: Path, row: TokenRow) -> Tensor:
    """[tokens, vocabulary] as the worker computes them with the published adapter."""
    config = json.loads((folder / "adapter_config.json").read_text())
    lora = LoRAConfig(
        rank=config["r"], alpha=config["lora_alpha"], target_modules=tuple(config["target_modules"])
    )
    engine.load(Load(number=0, task=name, lora=lora, training=Training()))
    engine.restore(name, load_file(folder / "adapter_model.safetensors"))
    segment = Segment(task=name, step=1, lengths=(len(row.ids),), first_row=0, weight=0.0, closes_step=False)
    logits = engine.logits(Train(number=1, segments=(segment,)), torch.from_numpy(row.ids.astype(np.int64)))
    engine.unload(name)
    return logits
