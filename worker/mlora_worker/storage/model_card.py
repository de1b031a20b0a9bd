"""The README.md beside an adapter's weights. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlora_worker.protocol import DataCounts, TaskPlan


def model_card(
    *, task: TaskPlan, config: Mapping[str, Any], step: int, loss: float | None, data: DataCounts | None
) -> str:
    """Markdown with the metadata header that model hubs read. JSON strings are valid YAML, whatever a name
    holds.
    """
    base = json.dumps(task.base_model, ensure_ascii=False)
    parts = [
        f"---\nbase_model: {base}\nlibrary_name: peft\npipeline_tag: text-generation\ntags:\n- lora\n---",
        f"# {task.name}\n\nA LoRA adapter for `{task.base_model}`, trained by the mLoRA operator.",
        "## Use\n\n```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f"base = AutoModelForCausalLM.from_pretrained({base})\n"
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")\n```',
        "## Result\n\n" + _table({"optimizer steps": step, "loss of the last step": loss}),
    ]
    if data is not None:
        counts: dict[str, Any] = {"rows": data.rows, "rows used": data.used}
        counts |= {f"rows dropped: {rule}": count for rule, count in sorted(data.dropped.items())}
        counts |= {
            "rows truncated": data.truncated,
            "tokens": data.tokens,
            "supervised tokens": data.supervised_tokens,
        }
        parts.append("## Data\n\n" + _table(counts))
    shape = {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "dropout": config["lora_dropout"],
        "target modules": ", ".join(config["target_modules"]),
        "base model revision": config["revision"],
    }
    training = {
        name.replace("_", " "): value for name, value in task.training.model_dump(mode="json").items()
    }
    parts.append("## Adapter and training\n\n" + _table(shape | training))
    return "\n\n".join(parts) + "\n"


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines])
