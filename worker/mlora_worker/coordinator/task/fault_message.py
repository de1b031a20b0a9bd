"""What a user reads of a fault that failed a task."""

from __future__ import annotations

from mlora_worker.pipeline.faults import Fault, Phase

_OF_ROWS = (Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE)  # what rows need there, and not the adapter


def explain(fault: Fault, step: int) -> str:
    """``step``: the one that the task was in. Every phase has words; one without would still be named."""
    where = f"stage {fault.stage}"
    what = {
        Phase.LOAD: "while its adapter was created",
        Phase.UPDATE: f"in the optimizer step before step {step}",
        Phase.FORWARD: f"in the forward of step {step}, while no other task was in the pipeline",
        Phase.BACKWARD: f"in the backward of step {step}, while no other task was in the pipeline",
        Phase.EVALUATE: f"in the evaluation after step {step}",
        Phase.KEEP: f"while its best adapter, of step {step}, was copied",
        Phase.CHECKPOINT: f"while its state after step {step} was copied",
        Phase.SAVE: "while its adapter was gathered",
    }.get(fault.phase, f"in {fault.phase}")
    if not fault.out_of_memory:
        return f"{where} failed {what}: {fault.error}"
    advice = "a smaller maxSeqLength" if fault.phase in _OF_ROWS else "a smaller rank or fewer targetModules"
    return f"{where} ran out of memory {what}: {fault.error}. Use {advice}, or a pipeline with more memory"
