"""Program of the nursery: loads every adapter with PEFT, and compares it with the undisturbed one of its kind.

``CHAOS_CHECK`` names a file: {"model": FOLDER, "adapters": {NAME: FOLDER}, "like": {NAME: FOLDER}, "answer": FILE}.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

WEIGHTS = "adapter_model.safetensors"


def main() -> None:
    asked = json.loads(Path(os.environ["CHAOS_CHECK"]).read_text())
    Path(asked["answer"]).write_text(json.dumps(compare(asked)))


def compare(asked: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each adapter: why it does not load, or (None) whether its bits are the same and how far they are apart."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(asked["model"])
    model: Any = None
    answer: dict[str, dict[str, Any]] = {}
    for name, folder in asked["adapters"].items():
        adapter = name.replace(".", "-")
        try:
            if model is None:
                model = PeftModel.from_pretrained(base, folder, adapter_name=adapter)
            else:
                model.load_adapter(folder, adapter_name=adapter)
        except Exception as error:
            answer[name] = {"flaw": f"{type(error).__name__}: {error}"}
            continue
        answer[name] = {"flaw": None, **distance(Path(folder), Path(asked["like"][name]))}
        if len(model.peft_config) > 1:  # one has to stay
            model.delete_adapter(adapter)
    return answer


def distance(one: Path, other: Path) -> dict[str, Any]:
    """``equal``: all bits. ``relative``: the greatest norm of a tensor's difference over the tensor's norm."""
    import torch
    from safetensors.torch import load_file

    left, right = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    if left.keys() != right.keys():
        return {"equal": False, "relative": 1.0}
    apart = [
        float(torch.linalg.vector_norm(left[name] - right[name]) / torch.linalg.vector_norm(right[name]))
        for name in left
    ]
    return {"equal": all(torch.equal(left[name], right[name]) for name in left), "relative": max(apart)}
