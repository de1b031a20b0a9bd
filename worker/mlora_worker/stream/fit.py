"""Whether a task fits the base model: its target modules, its rank, the length of its rows. Pure.

Operator, coordinator and `mlora plan` ask the same function, so that a task is refused with the same words wherever its
misfit is seen first: by the operator while no worker runs, if it knows the model's shape already, else by the coordinator
before the task takes a place in the pipeline.
"""

from __future__ import annotations

from mlora_worker.protocol import Failure, FailureReason, LoRAConfig, ModelFacts, Training

ALL_LINEAR = "all-linear"


class Misfit(ValueError):
    """``str(error)`` names what does not fit, with its figure, and says what to do."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def misfit(facts: ModelFacts, lora: LoRAConfig, training: Training) -> Failure | None:
    """Why such a task can never be trained on this model; None when nothing speaks against it."""
    try:
        target_names(facts, lora)
        check_length(facts.max_positions, training)
    except Misfit as error:
        return Failure(reason=error.reason, message=str(error))
    return None


def target_names(facts: ModelFacts, lora: LoRAConfig) -> tuple[str, ...]:
    """The module names that ``lora`` adapts, each once, in the order of the model's layers.

    ``all-linear`` means every linear module of the decoder layers: never the head, never the embeddings.
    Raises Misfit: an entry matches nothing in the whole model (the message has the real names); ``all-linear`` beside
    other names; a rank above the smaller side of a module, of which the excess could never be learnt.
    """
    known = tuple(dict.fromkeys(module.name for module in facts.modules))
    if ALL_LINEAR in lora.target_modules and len(set(lora.target_modules)) > 1:
        raise Misfit(
            FailureReason.INVALID_SPEC,
            f"targetModules: {ALL_LINEAR} stands alone; remove the other names or {ALL_LINEAR}",
        )
    asked = known if lora.target_modules[0] == ALL_LINEAR else lora.target_modules
    unknown = [name for name in dict.fromkeys(asked) if name not in known]
    if unknown:
        raise Misfit(
            FailureReason.UNKNOWN_TARGET_MODULE,
            f"targetModules: {', '.join(unknown)} is no linear module of the model's decoder layers; "
            f"there are {', '.join(known)} (or {ALL_LINEAR}); entries are names, not patterns",
        )
    targets = tuple(name for name in known if name in asked)
    for module in facts.modules:
        side = min(module.in_features, module.out_features)
        if module.name in targets and lora.rank > side:
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"rank {lora.rank} is larger than the smaller side of {module.name} "
                f"({module.in_features} x {module.out_features}): use at most {side}",
            )
    return targets


def check_length(max_positions: int, training: Training) -> None:
    """Raises Misfit when rows may be longer than the model knows positions for."""
    if training.max_seq_length > max_positions:
        raise Misfit(
            FailureReason.INVALID_SPEC,
            f"training.maxSeqLength is {training.max_seq_length}, but the base model takes {max_positions} "
            f"tokens at most: lower it to {max_positions} or less",
        )
