"""Rules of ``training.objective``, and of what it needs of a task's rows and steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlora_operator.api.rule import Rule
from mlora_worker.protocol import OBJECTIVE_FLAWS

# By the field that is wrong. Pydantic checks it by itself, so it has no Python form here.
_OBJECTIVE_CEL = {
    "beta": "self.type != 'sft' || !has(self.beta)",
    "lossType": "!has(self.lossType) || (self.lossType in ['kto', 'apo_zero_unpaired'] ? self.type == 'kto' : "
    "self.type == 'dpo' || (self.type == 'cpo' && self.lossType != 'robust'))",
    "labelSmoothing": "!has(self.labelSmoothing) || self.type == 'simpo' || "
    "(self.type == 'dpo' && has(self.lossType) && self.lossType == 'robust') || "
    "(self.type == 'cpo' && (!has(self.lossType) || self.lossType == 'sigmoid'))",
    "cpoAlpha": "!has(self.cpoAlpha) || self.type in ['cpo', 'simpo']",
    "simpoGamma": "!has(self.simpoGamma) || self.type == 'simpo'",
    "desirableWeight": "!has(self.desirableWeight) || self.type == 'kto'",
    "undesirableWeight": "!has(self.undesirableWeight) || self.type == 'kto'",
}

_PREFERENCES = ("preference", "unpairedPreference")  # of pairs, and of kto
# Of training: its loss needs an estimate of the divergence.
_ESTIMATES = (
    "has(self.objective) && self.objective.type == 'kto' && "
    "(!has(self.objective.lossType) || self.objective.lossType == 'kto')"
)

OBJECTIVE_RULES: tuple[Rule, ...] = (
    *(
        Rule(path=("training", "objective"), cel=cel, message=OBJECTIVE_FLAWS[field])
        for field, cel in _OBJECTIVE_CEL.items()
    ),
    Rule(
        path=(),
        cel="!has(self.dataset.format) || !(self.dataset.format in ['preference', 'unpairedPreference']) || "
        "(has(self.training.objective) && self.training.objective.type != 'sft')",
        message="rows of format preference have two answers each: training.objective.type must be dpo, cpo, simpo or orpo; "
        "those of unpairedPreference have one with a label: it must be kto",
        holds=lambda spec: spec["dataset"].get("format") not in _PREFERENCES or _prefers(spec),
    ),
    Rule(
        path=(),
        cel="!has(self.training.objective) || self.training.objective.type == 'sft' || !has(self.dataset.format) || "
        "self.dataset.format == (self.training.objective.type == 'kto' ? 'unpairedPreference' : 'preference')",
        message="training.objective.type kto takes rows with one answer and a label (dataset.format unpairedPreference), "
        "other types than sft take rows with a chosen and a rejected answer (preference): remove dataset.format, or "
        "correct it",
        holds=lambda spec: (
            not _prefers(spec)
            or spec["dataset"].get("format") in (None, _PREFERENCES[_type_of(spec) == "kto"])
        ),
    ),
    Rule(
        path=("training",),
        cel=f"!({_ESTIMATES}) || self.batchSize * self.gradientAccumulationSteps > 1",
        message="kto with lossType kto needs at least two rows in a step, whose answers it exchanges: raise batchSize or "
        "gradientAccumulationSteps, or set lossType apo_zero_unpaired",
        holds=lambda training: (
            not _estimates(training) or training["batchSize"] * training["gradientAccumulationSteps"] > 1
        ),
    ),
    Rule(
        path=(),
        cel=f"!({_ESTIMATES.replace('self.', 'self.training.')}) || !has(self.initFrom)",
        message="kto with lossType kto asks the reference about new rows in each step, and an adapter of initFrom changes "
        "meanwhile: set lossType apo_zero_unpaired, or remove initFrom",
        holds=lambda spec: not _estimates(spec["training"]) or "initFrom" not in spec,
    ),
    Rule(
        path=(),
        cel="!has(self.training.objective) || self.training.objective.type == 'sft' || !has(self.dataset.trainOn)",
        message="of rows of preferences all that follows the prompt counts: remove dataset.trainOn",
        holds=lambda spec: "trainOn" not in spec["dataset"] or not _prefers(spec),
    ),
)


def _type_of(spec: Mapping[str, Any]) -> str:
    return str(spec["training"].get("objective", {}).get("type", "sft"))


def _estimates(training: Mapping[str, Any]) -> bool:
    objective = training.get("objective", {})
    return bool(objective.get("type") == "kto" and objective.get("lossType", "kto") == "kto")


def _prefers(spec: Mapping[str, Any]) -> bool:
    return _type_of(spec) != "sft"
