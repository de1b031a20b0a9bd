"""Whether a task fits the base model: its target modules, its rank, the length of its rows. Pure.

Operator, coordinator and `mlora plan` ask the same function, so that a task is refused with the same words wherever its
misfit is seen first: by the operator while no worker runs, if it knows the model's shape already, else by the coordinator
before the task takes a place in the pipeline.
"""

from __future__ import annotations

from mlora_worker.protocol import Failure, FailureReason, LoRAConfig, ModelFacts, Training
from mlora_worker.stream.targets import Misfit, targets_of

_LONGEST_MESSAGE = 2048  # of a Failure


def misfit(facts: ModelFacts, lora: LoRAConfig, training: Training) -> Failure | None:
    """Why such a task can never be trained on this model; None when nothing speaks against it."""
    try:
        targets_of(facts, lora)
        check_length(facts.max_positions, training)
    except Misfit as error:
        return Failure(reason=error.reason, message=str(error)[:_LONGEST_MESSAGE])
    return None


def check_length(max_positions: int, training: Training) -> None:
    """Raises Misfit when rows may be longer than the model knows positions for."""
    if training.max_seq_length > max_positions:
        raise Misfit(
            FailureReason.INVALID_SPEC,
            f"training.maxSeqLength is {training.max_seq_length}, but the base model supports at most "
            f"{max_positions} tokens:"
            f" lower it to {max_positions} or less",
        )
