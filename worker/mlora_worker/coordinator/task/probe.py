"""A task that was made up: its one step shows whether the pipeline can train a microbatch that nothing is wrong with.

When every task that is there fails in the same way, each may be at fault (rows that the model cannot take), or the pipeline
(a device that computes no more). The probe tells: its row is of zeros, a token that every vocabulary has, and its adapter
the smallest that there is. It is loaded when it is asked for, alone in the pipeline, and unloaded at once.
"""

from __future__ import annotations

import numpy as np

from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.protocol import DataCounts, Dataset, LoRAConfig, TaskPhase, TaskPlan, Training
from mlora_worker.stream.planner import TaskLoad
from mlora_worker.stream.targets import EVERY_LINEAR

PROBE = "probe"  # no uid of an object looks like this
TOKENS = 8


def probe_task() -> TaskRun:
    """In the stream, as the dispatcher sees a task; its Load is still to be issued."""
    row = np.zeros(TOKENS, np.int32)
    training = Training(batch_size=1, max_steps=1, checkpoint_every_steps=0)
    plan = TaskPlan(
        uid=PROBE,
        namespace="",
        name=PROBE,
        admitted=True,
        base_model="",
        lora=LoRAConfig(rank=1, alpha=1, target_modules=(EVERY_LINEAR,)),
        dataset=Dataset(inline=""),
        training=training,
        output_uri="s3://probe",  # nothing is ever written there
    )
    prepared = PreparedTask(
        rows=(TokenRow(row, row),),
        counts=DataCounts(rows=1, used=1),
        steps=StepPlan(1, training),
        targets=(),
        load=TaskLoad(TOKENS, 1),
    )
    return TaskRun(plan, TaskPhase.TRAINING, prepared, in_stream=True)
