"""The frozen base model that all sides share: SmolLM2-135M-Instruct, whole or cut to its first layers."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from mlora_worker.frozen.linear import Freeze
from mlora_worker.model.products import choose_products, load_with
from mlora_worker.model.stage import Stage
from mlora_worker.protocol import ModelSource, StorageAccess
from mlora_worker.storage.base_model.model_source import ModelFiles
from mlora_worker.storage.object_store.store import open_store

CPU = torch.device("cpu")
TOKENIZER_FILES = ("tokenizer*", "special_tokens*", "chat_template*", "vocab*", "merges*")


def smollm2_folder() -> Path:
    """Of the whole model; converted the first time."""
    from examples.model.smollm2 import smollm2

    return smollm2()


def cut_folder(whole: Path, layers: int, target: Path) -> Path:
    """Write the model of ``whole`` with its first ``layers`` decoder layers only, and its tokenizer, to ``target``."""
    set_verbosity_error()
    disable_progress_bar()
    config = AutoConfig.from_pretrained(whole)
    model: Any = AutoModelForCausalLM.from_pretrained(whole, dtype=config.dtype)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(target)
    return with_tokenizer(whole, target)


def with_tokenizer(whole: Path, target: Path) -> Path:
    """``target``, with the tokenizer of the model in ``whole``."""
    for pattern in TOKENIZER_FILES:
        for path in whole.glob(pattern):
            shutil.copy(path, target)
    return target


def whole_stage(
    folder: Path, dtype: torch.dtype, device: torch.device = CPU, freeze: Freeze | None = None
) -> Stage:
    """The model as one stage of this project, with the products that a worker would choose here. ``freeze``: see
    ``load_with``."""
    store = open_store(StorageAccess(), allow_files=True)
    source = ModelSource(name="base", uri=f"file://{folder}", dtype=str(dtype).removeprefix("torch."))
    chosen = choose_products(folder, 0, 1, dtype, device, None)
    return load_with(chosen, folder, ModelFiles(store, source, folder), 0, 1, dtype, device, freeze)


def transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    """The same model as transformers has it, frozen, in training mode."""
    set_verbosity_error()
    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.requires_grad_(False)
    return model.train()


def sharing_copy(model: Any, attention: str = "sdpa") -> Any:
    """A copy with modules of its own, to be changed at will, and the very same weights in memory."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, shared)
    made.set_attn_implementation(attention)
    return made
