"""One row of about 100,000 tokens among 99 short ones: each policy says what becomes of it, a neighbour never notices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mlora_worker.protocol import FailureReason, TaskPhase, TaskPlan
from tests.fixtures.tiny_model import write_tiny_model
from tests.integration.worker.conftest import Group

pytestmark = pytest.mark.integration

LIMIT = 2048
FIELDS = {"prompt": "question", "completion": "answer"}


@pytest.fixture
def one_long_row(tmp_path: Path) -> dict[str, object]:
    answers = [f"She sold {number} clips." for number in range(99)]
    answers.insert(50, "How many clips did Natalia sell altogether? " * 11_000)
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"question": "How many?", "answer": one}) for one in answers))
    return {"uri": f"file://{file}", "fields": FIELDS}


def test_a_very_long_row_is_cut_left_out_or_refused_and_its_neighbour_trains_as_if_alone(
    start_group: Callable[..., Group],
    make_task: Callable[..., TaskPlan],
    one_long_row: dict[str, object],
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model", layers=2, positions=4096)
    group = start_group(model, stages=2, microbatch_tokens=4096)
    alone, beside = (
        make_task(
            "neighbour",  # the rows of a task follow from its name
            uid=f"neighbour-{number}",
            outputUri=f"file://{tmp_path}/neighbour/{number}",
            training={"maxSteps": 30, "batchSize": 2},
            lora={"dropout": 0.1},
        )
        for number in range(2)
    )
    without = group.finish(alone)["neighbour"]

    training = {"maxSeqLength": LIMIT, "maxSteps": None, "epochs": 1}
    tasks = [
        make_task(policy, dataset=one_long_row, training={**training, "overlong": policy})
        for policy in ("truncate", "skip", "fail")
    ]
    beyond = make_task("beyond", dataset=one_long_row, training={**training, "maxSeqLength": 8192})
    found = group.finish(beside, *tasks, beyond)
    group.stop()

    truncated, skipped, refused = (found[task.name] for task in tasks)
    assert truncated.phase is skipped.phase is TaskPhase.SUCCEEDED, (truncated.failure, skipped.failure)
    assert truncated.data is not None
    assert (truncated.data.rows, truncated.data.used, truncated.data.truncated) == (100, 100, 1)
    assert truncated.step == 25
    assert skipped.data is not None
    assert (skipped.data.rows, skipped.data.used, skipped.data.truncated) == (100, 99, 0)
    assert sum(skipped.data.dropped.values()) == 1
    assert list(skipped.data.first_dropped.values()) == [(51,)]
    assert refused.failure is not None
    assert refused.failure.reason is FailureReason.ROW_TOO_LONG
    assert "51" in refused.failure.message
    too_long = found["beyond"].failure
    assert too_long is not None
    assert "4096" in too_long.message, "what the model takes is said before anything is trained"

    with_others = found["neighbour"]
    assert with_others.phase is TaskPhase.SUCCEEDED
    assert with_others.loss == pytest.approx(without.loss, rel=1e-5)
    ours, theirs = (
        load_file(Path(task.output_uri.removeprefix("file://")) / "adapter_model.safetensors")
        for task in (beside, alone)
    )
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
