"""The README.md beside an adapter's weights. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mlora_worker.protocol import (
    LOSSES_OF,
    AdapterType,
    DataCounts,
    EvaluationRecord,
    Objective,
    ObjectiveType,
    Optimizer,
    OptimizerType,
    TaskPlan,
)

# Said in words: a licence's short name in the header would be a statement that nobody here can make.
_LICENCE = (
    "This card states no licence. An adapter works only with its base model and was trained on its rows, so the "
    "licences of the base model and of the data determine how it may be used. Set `license` in the header "
    "accordingly before you distribute this folder."
)
_PATTERNS = (
    "Modules differ in rank or alpha (`rank_pattern`, `alpha_pattern`). PEFT reads these, and so does vLLM from 0.32 on; "
    "engines that take one rank and one alpha for the whole adapter, such as former vLLM, would scale these modules "
    "wrongly: write it with `mlora export --plain` for them."
)

_OTHER_KIND = (
    "PEFT reads this kind of adapter; serving engines that know plain LoRA alone, such as vLLM, and "
    "GGUF do not: merge the adapter into its base for them."
)
_QUANTISED = (
    "The base model's matrices were quantised while this adapter was trained. It loads on the plain base, too, whose "
    "outputs differ a little from those that it was trained on."
)

_MOST_MODULES = 20  # that the card names
# How paths begin in models that also read images.
_TEXT_PARTS = ("model.language_model.", "language_model.")


def model_card(
    *,
    task: TaskPlan,
    config: Mapping[str, Any],
    step: int,
    loss: float | None,
    data: DataCounts | None,
    evaluation: EvaluationRecord | None = None,
    quantization: str | None = None,
) -> str:
    """Markdown with the metadata header that model hubs read. JSON strings are valid YAML, whatever a name
    holds. ``step`` and ``evaluation`` are those of the published weights, ``loss`` that of the last training step.
    """
    name, revision = config["base_model_name_or_path"], config["revision"]
    base = json.dumps(name, ensure_ascii=False)
    adapted = (*config["target_modules"], *config.get("target_parameters", ()))
    within = any(path.startswith(_TEXT_PARTS) for path in adapted)
    loader = "AutoModelForImageTextToText" if within else "AutoModelForCausalLM"
    pinned = f", revision={json.dumps(revision, ensure_ascii=False)}" if revision else ""
    parts = [
        f"---\nbase_model: {base}\nlibrary_name: peft\npipeline_tag: text-generation\ntags:\n- lora\n---",
        f"# {task.name}\n\nA {_kind(task)} adapter for `{name}`, trained by the mLoRA operator.",
        f"## Use\n\n```python\nfrom peft import PeftModel\nfrom transformers import {loader}\n\n"
        f"base = {loader}.from_pretrained({base}{pinned})\n"
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")\n```',
        "## Result\n\n"
        + _table({"optimizer steps": step, "loss of the last step": loss} | _scores(evaluation)),
    ]
    if data is not None:
        counts: dict[str, Any] = {"rows": data.rows, "rows used": data.used}
        counts |= {f"rows dropped: {rule}": count for rule, count in sorted(data.dropped.items())}
        counts |= {
            "rows truncated": data.truncated,
            "rows held out": data.held_out or None,
            "tokens": data.tokens,
            "supervised tokens": data.supervised_tokens,
        }
        parts.append("## Data\n\n" + _table(counts))
    shape = {
        "rank": config["r"],
        "alpha": config.get("lora_alpha"),
        "smallest --max-lora-rank of vLLM": task.lora.served_rank,
        "dropout": task.lora.dropout,
        "kind": _kind(task),
        "target modules": _listed(config["target_modules"]) or None,
        "target parameters": _listed(config.get("target_parameters", ())) or None,
        "weights' type": task.output_dtype.value,
        "base model revision": revision,
        "base model quantisation": quantization,
    }
    training = {
        name.replace("_", " "): value
        for name, value in task.training.model_dump(mode="json", exclude={"optimizer", "objective"}).items()
    }
    training |= _objective(task.training.preference)
    numbers = task.training.optimizer or Optimizer()
    training["optimizer"] = numbers.type.value
    training["optimizer betas"] = ", ".join(map(str, numbers.betas))
    if numbers.type is OptimizerType.ADAMW:
        training["optimizer epsilon"] = numbers.denominator
    training["learning rate of B, as a multiple (LoRA+)"] = task.lora.loraplus_lr_ratio
    parts.append("## Adapter and training\n\n" + _table(shape | training))
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        parts.append(_PATTERNS)
    if _kind(task) != "LoRA":
        parts.append(_OTHER_KIND)
    if quantization is not None:
        parts.append(_QUANTISED)
    parts.append("## Licence\n\n" + _LICENCE)
    return "\n\n".join(parts) + "\n"


def _kind(task: TaskPlan) -> str:
    if task.lora.type is AdapterType.VERA:
        return "VeRA"
    return "DoRA" if task.lora.use_dora else "LoRA"


def _objective(objective: Objective | None) -> dict[str, Any]:
    """Of rows of preferences, the numbers that hold, whether they were written or are the usual ones."""
    if objective is None:
        return {}
    kind = objective.type
    return {
        "objective": kind.value,
        "objective's beta": objective.temperature,
        "objective's loss": objective.loss.value if kind in LOSSES_OF else None,
        "objective's label smoothing": objective.smoothing or None,
        "weight of the chosen answers' cross entropy": objective.likelihood or None,
        "objective's margin that is aimed at (gamma)": objective.gamma
        if kind is ObjectiveType.SIMPO
        else None,
        "weights of desirable and undesirable answers": ", ".join(map(str, reversed(objective.label_weights)))
        if kind is ObjectiveType.KTO
        else None,
    }


def _scores(evaluation: EvaluationRecord | None) -> dict[str, Any]:
    if evaluation is None:
        return {}
    told = evaluation.preference
    if told is not None:
        return {
            "evaluation loss (of the objective)": evaluation.loss,
            "evaluation margin between chosen and rejected": told.margin,
            "evaluation accuracy (pairs whose chosen answer is preferred)": told.accuracy,
            "evaluation divergence from the reference (KL)": told.kl,
            "evaluation token accuracy of the chosen answers": evaluation.token_accuracy,
            "evaluated tokens": evaluation.tokens,
        }
    return {
        "evaluation loss": evaluation.loss,
        "evaluation perplexity": perplexity(evaluation.loss),
        "evaluation token accuracy": evaluation.token_accuracy,
        "evaluated tokens": evaluation.tokens,
    }


def perplexity(loss: float) -> float | None:
    """Of a mean cross entropy in nats; None where it is beyond any number."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None


def _listed(modules: Sequence[str]) -> str:
    more = len(modules) - _MOST_MODULES
    shown = ", ".join(modules[:_MOST_MODULES])
    return shown if more <= 0 else f"{shown} and {more} more, in adapter_config.json"


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines])
