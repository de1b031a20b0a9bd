"""A fault is told in a user's words, whatever was being done: rank 0 must not end over one that it has no words for."""

from __future__ import annotations

import pytest

from mlora_worker.coordinator.task.fault_message import explain
from mlora_worker.pipeline.faults import Fault, Phase


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_words(phase: Phase, memory: bool) -> None:
    fault = Fault(stage=1, number=3, phase=phase, task="a", out_of_memory=memory, error="ValueError: odd")
    said = explain(fault, step=7)
    assert said.startswith("stage 1 ran out of memory " if memory else "stage 1 failed ")
    assert "ValueError: odd" in said
    assert f" in {phase}: " not in said, "these are the words for what has none"


def test_what_rows_need_and_what_the_adapter_needs_have_their_own_advice() -> None:
    def advice(phase: Phase) -> str:
        fault = Fault(stage=0, number=1, phase=phase, out_of_memory=True, error="MemoryError")
        return explain(fault, step=1).partition("Use ")[2].partition(",")[0]

    assert {phase for phase in Phase if advice(phase) == "a smaller maxSeqLength"} == {
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.EVALUATE,
    }
