"""An adapter that needs nothing new is read by an old PEFT, and computes there what it computes in today's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from mlora_worker.protocol import LoRAConfig
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, WEIGHTS_NAME, adapter_config
from tests.equivalence.tasks import Base

OLD = Path(sys.prefix) / "old-peft"  # .ci/setup puts it there
# Of LoraConfig and what it inherits, in PEFT 0.5.0.
FIELDS_OF_0_5 = frozenset(
    {
        "peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "r",
        "target_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "modules_to_save", "init_lora_weights",
        "layers_to_transform", "layers_pattern",
    }
)  # fmt: skip
LOGITS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import peft
from transformers import AutoModelForCausalLM
assert peft.__version__ == "0.7.0", peft.__version__
base = AutoModelForCausalLM.from_pretrained(sys.argv[2])
model = peft.PeftModel.from_pretrained(base, sys.argv[3])
with torch.no_grad():
    torch.save(model(torch.arange(12)[None]).logits, sys.argv[4])
"""


def written(folder: Path, base: Base, lora: LoRAConfig) -> Path:
    names = ["q_proj", "down_proj"]
    torch.manual_seed(1)
    tensors = {}
    for path, module in base.model.named_modules():
        if path.rpartition(".")[2] in names:
            rank = lora.rank_pattern.get(path.rpartition(".")[2], lora.rank)
            key = f"base_model.model.{path}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, module.in_features)
            tensors[f"{key}.lora_B.weight"] = torch.randn(module.out_features, rank)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_NAME, {"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(adapter_config(lora, "org/tiny", None, names)))
    return folder


def test_what_peft_0_5_does_not_know_is_not_written_unless_it_is_needed() -> None:
    plain = adapter_config(LoRAConfig(dropout=0.1), "org/tiny", None, ["q_proj"])
    assert plain.keys() <= FIELDS_OF_0_5
    new = adapter_config(
        LoRAConfig(use_rslora=True, rank_pattern={"q_proj": 4}), "org/tiny", None, ["q_proj"]
    )
    assert new.keys() - FIELDS_OF_0_5 == {"use_rslora", "rank_pattern"}


@pytest.mark.parametrize(
    "lora",
    [LoRAConfig(rank=4, alpha=8), LoRAConfig(rank=4, alpha=8, rank_pattern={"q_proj": 2})],
    ids=["plain", "ranks of their own"],
)
def test_peft_0_7_computes_what_todays_does(base: Base, tmp_path: Path, lora: LoRAConfig) -> None:
    adapter, folder = written(tmp_path / "adapter", base, lora), tmp_path / "base"
    base.model.save_pretrained(folder)
    arguments = [OLD, folder, adapter, tmp_path / "logits.pt"]
    subprocess.run([sys.executable, "-c", LOGITS, *map(str, arguments)], check=True, timeout=300)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    with torch.no_grad():
        wanted = model(torch.arange(12)[None]).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), wanted)
