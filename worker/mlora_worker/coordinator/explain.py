"""What a user reads of a fault that failed a task."""

from __future__ import annotations

from mlora_worker.pipeline.faults import Fault, Phase


def explain(fault: Fault, step: int) -> str:
    """``step``: the one that the task was in."""
    where = f"stage {fault.stage}"
    what = {
        Phase.LOAD: "while its adapter was made",
        Phase.UPDATE: f"in the optimizer step before step {step}",
        Phase.FORWARD: f"in the forward of step {step}, with nothing else in the pipeline",
        Phase.BACKWARD: f"in the backward of step {step}, with nothing else in the pipeline",
        Phase.CHECKPOINT: f"while its state after step {step} was copied",
        Phase.SAVE: "while its adapter was gathered",
    }[fault.phase]
    if not fault.out_of_memory:
        return f"{where} failed {what}: {fault.error}"
    advice = (
        "a smaller maxSeqLength"
        if fault.phase in (Phase.FORWARD, Phase.BACKWARD)
        else "a smaller rank or fewer targetModules"
    )
    return f"{where} ran out of memory {what}: {fault.error}. What helps: {advice}, or a pipeline with more memory"
