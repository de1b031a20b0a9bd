"""All that decides a task's result, by names that a user understands. Pure.

A checkpoint carries these facts, and is taken up only by a task that has the same ones. Where the rows came from is not
among them, nor on how many stages they were trained: what counts is which tokens they became, in which order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import date

from mlora_worker.data.training_rows.token_rows import TokenRow, digest_of
from mlora_worker.protocol import (
    PROTOCOL_VERSION,
    AdapterType,
    DatasetFormat,
    InitialWeights,
    LoRAConfig,
    ModelFacts,
    ModelSource,
    Objective,
    Optimizer,
    Training,
)
from mlora_worker.storage.artifacts.task_state import DAY, DETECTED_FORMAT, Fact, Fingerprint

# How often checkpoints are taken changes nothing; epochs and maxSteps decide the number of steps, which is a fact itself.
# What differs in an optimizer or an objective is named below.
_NO_FACTS = {"checkpoint_every_steps", "epochs", "max_steps", "optimizer", "objective"}


def day_in(facts: Fingerprint) -> date | None:
    """A task that goes on has its rows as they were. None where there is none; what is no day will not be its own."""
    day = facts.get(DAY)
    with suppress(ValueError):
        return date.fromisoformat(day) if isinstance(day, str) else None
    return None


def format_in(facts: Fingerprint) -> DatasetFormat | None:
    """What was detected when the task began, whatever its file has become. None where its spec named one."""
    format = facts.get(DETECTED_FORMAT)
    with suppress(ValueError):
        return DatasetFormat(format) if isinstance(format, str) else None
    return None


def fingerprint_of(
    lora: LoRAConfig,
    training: Training,
    targets: Sequence[str],
    rows: Sequence[TokenRow],
    total_steps: int,
    source: ModelSource,
    shape: ModelFacts,
) -> dict[str, Fact]:
    """``targets``: resolved names of modules; ``rows`` in training order."""
    facts: dict[str, Fact] = {
        "protocol": PROTOCOL_VERSION,
        "model.name": source.name,
        "model.revision": source.revision,
        "model.dtype": source.dtype,
        "model.layers": shape.layers,
        "model.hiddenSize": shape.hidden_size,
        "model.intermediateSize": shape.intermediate_size,
        "model.attentionHeads": shape.attention_heads,
        "model.vocabSize": shape.vocab_size,
        "lora.rank": lora.rank,
        "lora.alpha": float(lora.alpha),
        "lora.dropout": float(lora.dropout),
        "lora.targetModules": tuple(sorted(targets)),
        "training.totalSteps": total_steps,
        "dataset.rows": len(rows),
        "dataset.sha256": digest_of(rows),
    }
    if source.quantization is not None:
        facts["model.quantization"] = source.quantization.label
    if source.commit is not None:  # a branch may have moved since
        facts["model.commit"] = source.commit
    # Named where they are not the usual, so that a checkpoint from before they were there is known.
    for name, pattern in (("rank", lora.rank_pattern.items()), ("alpha", lora.alpha_pattern.items())):
        if pattern:
            facts[f"lora.{name}Pattern"] = tuple(f"{key}: {float(figure)}" for key, figure in sorted(pattern))
    if lora.use_rslora:
        facts["lora.useRslora"] = True
    if lora.type is not AdapterType.LORA:
        facts["lora.type"] = lora.type.value
        facts["lora.dInitial"] = lora.vera_start
    if lora.use_dora:
        facts["lora.useDora"] = True
    if lora.loraplus_lr_ratio is not None:
        facts["lora.loraplusLrRatio"] = float(lora.loraplus_lr_ratio)
    if lora.init_lora_weights is not InitialWeights.DEFAULT:
        facts["lora.initLoraWeights"] = lora.init_lora_weights.value
    settings = training.model_dump(mode="json", by_alias=True, exclude=_NO_FACTS, exclude_none=True)
    numbers = training.optimizer or Optimizer()
    for name, value in numbers.model_dump(mode="json", by_alias=True, exclude_defaults=True).items():
        facts[f"training.optimizer.{name}"] = value
    objective = training.objective or Objective()
    for name, value in objective.model_dump(mode="json", by_alias=True, exclude_defaults=True).items():
        facts[f"training.objective.{name}"] = value
    return facts | {f"training.{name}": value for name, value in settings.items()}
