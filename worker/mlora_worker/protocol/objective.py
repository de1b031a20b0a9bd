"""What an adapter is trained for (part of the LoRATask spec): answers as they stand, or some answers rather than others.

The names are TRL's, in camelCase. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field, model_validator

from mlora_worker.protocol.message import Message


class ObjectiveType(StrEnum):
    """sft learns answers; kto learns from single ones that are desirable or not; the others learn to prefer one answer to
    another."""

    SFT = "sft"
    DPO = "dpo"
    CPO = "cpo"
    SIMPO = "simpo"
    ORPO = "orpo"
    KTO = "kto"


class PreferenceLoss(StrEnum):
    """How a margin between two answers, or how far one answer has come, becomes a loss. The values are TRL's."""

    SIGMOID = "sigmoid"
    HINGE = "hinge"
    IPO = "ipo"
    ROBUST = "robust"
    KTO = "kto"
    APO_ZERO_UNPAIRED = "apo_zero_unpaired"


Beta = Annotated[float, Field(strict=True, gt=0, le=1000)]
Factor = Annotated[float, Field(strict=True, ge=0, le=1000)]
Smoothing = Annotated[float, Field(strict=True, ge=0, lt=0.5)]

# Which losses each type has, the usual one first; and which of them take labelSmoothing.
LOSSES_OF: Final[Mapping[ObjectiveType, tuple[PreferenceLoss, ...]]] = {
    ObjectiveType.DPO: (
        PreferenceLoss.SIGMOID,
        PreferenceLoss.HINGE,
        PreferenceLoss.IPO,
        PreferenceLoss.ROBUST,
    ),
    ObjectiveType.CPO: (PreferenceLoss.SIGMOID, PreferenceLoss.HINGE, PreferenceLoss.IPO),
    ObjectiveType.KTO: (PreferenceLoss.KTO, PreferenceLoss.APO_ZERO_UNPAIRED),
}
# Of each field, in words, what it has no meaning for and what to do.
OBJECTIVE_FLAWS: Final[Mapping[str, str]] = {
    "beta": "beta has a meaning only for dpo, cpo, simpo, orpo and kto: remove it, or set type",
    "lossType": "lossType is sigmoid, hinge, ipo or robust for dpo, sigmoid, hinge or ipo for cpo, and kto or "
    "apo_zero_unpaired for kto; other types have one loss: correct it, or remove it",
    "labelSmoothing": "labelSmoothing has a meaning only for dpo with lossType robust, cpo with lossType sigmoid, and "
    "simpo: remove it, or correct lossType",
    "cpoAlpha": "cpoAlpha has a meaning only for cpo and simpo: remove it",
    "simpoGamma": "simpoGamma has a meaning only for simpo: remove it",
    "desirableWeight": "desirableWeight has a meaning only for kto: remove it",
    "undesirableWeight": "undesirableWeight has a meaning only for kto: remove it",
}
USUAL_BETA, USUAL_CPO_ALPHA, USUAL_SIMPO_GAMMA = 0.1, 1.0, 0.5


class Objective(Message):
    """A number that is left out is TRL's default for the type."""

    type: ObjectiveType = Field(
        default=ObjectiveType.SFT,
        description="sft (learn the answers), or, of rows with a chosen and a rejected answer: dpo, cpo, simpo or orpo; of "
        "rows with one answer and a label, whether it is desirable: kto.",
    )
    beta: Beta | None = Field(
        default=None,
        description="All but sft: how strongly a margin counts; of dpo and kto, how strongly the adapter is kept "
        "near its reference. Absent: 0.1.",
    )
    loss_type: PreferenceLoss | None = Field(
        default=None,
        description="dpo: sigmoid, hinge, ipo or robust. cpo: sigmoid, hinge or ipo. kto: kto or apo_zero_unpaired. "
        "Absent: sigmoid, of kto: kto.",
    )
    label_smoothing: Smoothing | None = Field(
        default=None,
        description="Probability that a row's chosen and rejected answers are the wrong way round: of dpo with lossType "
        "robust, cpo with sigmoid, and simpo. Absent: 0.",
    )
    cpo_alpha: Factor | None = Field(
        default=None,
        description="cpo, simpo: weight of the cross entropy of the chosen answers. Absent: 1 for cpo, 0 for simpo.",
    )
    simpo_gamma: Factor | None = Field(
        default=None, description="simpo: the margin that is aimed at. Absent: 0.5."
    )
    desirable_weight: Factor | None = Field(
        default=None, description="kto: what the loss of a desirable answer is multiplied by. Absent: 1."
    )
    undesirable_weight: Factor | None = Field(
        default=None, description="kto: what the loss of an undesirable answer is multiplied by. Absent: 1."
    )

    @model_validator(mode="after")
    def _has_what_its_type_has(self) -> Objective:
        for flaw in flaws_of(self):
            raise ValueError(flaw)
        return self

    @property
    def prefers(self) -> bool:
        """Its rows are pairs of answers, or single ones that are desirable or not."""
        return self.type is not ObjectiveType.SFT

    @property
    def paired(self) -> bool:
        """Its rows are pairs of answers."""
        return self.prefers and self.type is not ObjectiveType.KTO

    @property
    def has_reference(self) -> bool:
        """It compares with what the base, or the adapter that the task begins with, thinks of a row."""
        return self.type in (ObjectiveType.DPO, ObjectiveType.KTO)

    @property
    def has_divergence(self) -> bool:
        """Each row is compared with how far the adapter has come from its reference on the rows of the whole step."""
        return self.type is ObjectiveType.KTO and self.loss is PreferenceLoss.KTO

    @property
    def learns_prompts(self) -> bool:
        """The cross entropy of the chosen row is that of its prompt, too."""
        return self.type is ObjectiveType.ORPO

    @property
    def loss(self) -> PreferenceLoss:
        if self.loss_type is not None:
            return self.loss_type
        return PreferenceLoss.KTO if self.type is ObjectiveType.KTO else PreferenceLoss.SIGMOID

    @property
    def temperature(self) -> float:
        return USUAL_BETA if self.beta is None else self.beta

    @property
    def smoothing(self) -> float:
        return self.label_smoothing or 0.0

    @property
    def gamma(self) -> float:
        return USUAL_SIMPO_GAMMA if self.simpo_gamma is None else self.simpo_gamma

    @property
    def label_weights(self) -> tuple[float, float]:
        """Of undesirable and of desirable answers."""
        given = self.undesirable_weight, self.desirable_weight
        undesirable, desirable = (1.0 if weight is None else weight for weight in given)
        return undesirable, desirable

    @property
    def likelihood(self) -> float:
        """Weight of the mean cross entropy of the chosen rows."""
        match self.type:
            case ObjectiveType.ORPO:
                return 1.0
            case ObjectiveType.CPO:
                return USUAL_CPO_ALPHA if self.cpo_alpha is None else self.cpo_alpha
            case ObjectiveType.SIMPO:
                return self.cpo_alpha or 0.0
        return 0.0


def flaws_of(objective: Objective) -> list[str]:
    """What is set and has no meaning for its type, each with what to do."""
    kind = objective.type
    flaws = []
    if objective.beta is not None and not objective.prefers:
        flaws.append(OBJECTIVE_FLAWS["beta"])
    if objective.loss_type is not None and objective.loss_type not in LOSSES_OF.get(kind, ()):
        flaws.append(OBJECTIVE_FLAWS["lossType"])
    if objective.label_smoothing is not None and not _smooths(objective):
        flaws.append(OBJECTIVE_FLAWS["labelSmoothing"])
    if objective.cpo_alpha is not None and kind not in (ObjectiveType.CPO, ObjectiveType.SIMPO):
        flaws.append(OBJECTIVE_FLAWS["cpoAlpha"])
    if objective.simpo_gamma is not None and kind is not ObjectiveType.SIMPO:
        flaws.append(OBJECTIVE_FLAWS["simpoGamma"])
    if objective.desirable_weight is not None and kind is not ObjectiveType.KTO:
        flaws.append(OBJECTIVE_FLAWS["desirableWeight"])
    if objective.undesirable_weight is not None and kind is not ObjectiveType.KTO:
        flaws.append(OBJECTIVE_FLAWS["undesirableWeight"])
    return flaws


def _smooths(objective: Objective) -> bool:
    match objective.type:
        case ObjectiveType.DPO:
            return objective.loss is PreferenceLoss.ROBUST
        case ObjectiveType.CPO:
            return objective.loss is PreferenceLoss.SIGMOID
    return objective.type is ObjectiveType.SIMPO
