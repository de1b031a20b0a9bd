"""Which fields of PEFT's ``adapter_config.json`` a plain LoRA adapter has. Pure.

PEFT may import modules, ask a hub or open other folders for the others, and whoever wrote the file decided their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlora_worker.protocol import is_parameter

# They say what the adapter computes.
WITH_MEANING = frozenset(
    {
        "alpha_pattern", "bias", "lora_alpha", "modules_to_save", "peft_type", "r", "rank_pattern", "use_dora",
        "use_rslora",
    }
)  # fmt: skip
# They do not change what the adapter computes, or its tensors' names say the same.
WITHOUT_MEANING = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode",
        "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip
_MEGATRON = "megatron.core"  # PEFT's default, which it always writes; it imports what is named there


def unknown_field(config: Mapping[str, Any]) -> str | None:
    """The first field that says something and is none of these."""
    known = WITH_MEANING | WITHOUT_MEANING
    for name, value in config.items():
        if name == "target_parameters" and _are_known(value):
            continue  # weights of linear modules, or routed experts; their tensors' names say so
        if value and (name not in known or (name == "megatron_core" and value != _MEGATRON)):
            return name
    return None


def _are_known(names: object) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) and is_parameter(name) for name in names)
