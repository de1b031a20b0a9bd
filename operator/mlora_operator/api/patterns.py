"""What is wrong with the names and patterns of a task, as far as that can be said without a base model. Pure.

Neither a schema nor CEL can say it, so the API server takes such a task; the operator refuses it, and so does
``mlora validate``.
"""

from __future__ import annotations

from mlora_operator.api.rule import Path
from mlora_worker.protocol import LoRAConfig
from mlora_worker.stream.entries import Misfit, entries_of


def wrong_patterns(lora: LoRAConfig) -> tuple[Path, str] | None:
    """The field below ``spec`` and what is wrong with it, or None."""
    try:
        entries_of(lora)
    except Misfit as error:
        field, _, words = str(error).partition(": ")
        return (("lora",) if field == "lora" else ("lora", field)), words
    return None
