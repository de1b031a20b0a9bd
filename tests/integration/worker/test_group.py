"""Real ranks over gloo: tasks become adapters that do not depend on neighbours or stages; a lost rank ends the group."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlora_worker.protocol import FailureReason, TaskPhase, TaskPlan
from mlora_worker.stream.timeline import Timeline
from tests.integration.worker.conftest import Group

pytestmark = pytest.mark.integration

MakeTask = Callable[..., TaskPlan]
StartGroup = Callable[..., Group]

SHAPES = {
    "a": {"lora": {"rank": 4, "alpha": 8, "targetModules": ["q_proj", "v_proj"]}, "training": {"maxSteps": 10}},
    "b": {
        "lora": {"rank": 8, "alpha": 8, "targetModules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "training": {"maxSteps": 10, "batchSize": 2},
    },
    "c": {
        "lora": {"rank": 2, "alpha": 4, "targetModules": ["all-linear"]},
        "training": {"maxSteps": 10, "batchSize": 3, "seed": 7},
    },
}  # fmt: skip


def weights_of(task: TaskPlan) -> dict[str, torch.Tensor]:
    return load_file(Path(task.output_uri.removeprefix("file://")) / "adapter_model.safetensors")


def relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(((one[key] - other[key]).norm() / one[key].norm()).item() for key in one)


def test_adapters_do_not_depend_on_neighbours_or_stages(
    start_group: StartGroup, two_stages: Group, make_task: MakeTask, tiny_model: Path, tmp_path: Path
) -> None:
    alone: dict[str, dict[str, torch.Tensor]] = {}
    groups = {stages: start_group(tiny_model, stages=stages) for stages in (1, 3)}
    groups[2] = two_stages
    group = groups[1]
    for name, shape in SHAPES.items():
        task = make_task(name, **shape, outputUri=f"file://{tmp_path}/alone/{name}")
        report = group.finish(task)[name]
        assert report.phase is TaskPhase.SUCCEEDED, report.failure
        assert report.step == report.total_steps == 10
        alone[name] = weights_of(task)

    for stages, group in groups.items():
        before = group.report().wire
        tasks = [
            make_task(name, **shape, uid=f"{name}-{stages}", outputUri=f"file://{tmp_path}/{stages}/{name}")
            for name, shape in SHAPES.items()
        ]
        # Prepared first, so that none is done before the others begin.
        group.plan(*(task.model_copy(update={"admitted": False}) for task in tasks))
        group.wait_for(
            lambda report: [task.phase for task in report.tasks] == [TaskPhase.PREPARED] * len(SHAPES)
        )
        reports = group.finish(*tasks)
        assert {report.phase for report in reports.values()} == {TaskPhase.SUCCEEDED}, reports
        wire = group.report().wire
        assert wire.concurrent_tasks == 3, "the tasks shared the pipeline"
        hidden, float32 = 64, 4
        tokens, sent = wire.tokens - before.tokens, wire.payload_bytes - before.payload_bytes
        assert sent == 2 * (stages - 1) * tokens * hidden * float32
        for task in tasks:
            assert relative_difference(alone[task.name], weights_of(task)) < 1e-5, (stages, task.name)
    for stages in (1, 3):
        groups[stages].stop()


def test_tasks_join_and_leave_while_others_train(two_stages: Group, make_task: MakeTask) -> None:
    group = two_stages
    long = make_task("long", training={"maxSteps": 60})
    group.plan(long)
    group.wait_for(lambda report: any(task.step >= 2 for task in report.tasks))
    short = make_task("short", training={"maxSteps": 3})
    withdrawn = make_task("withdrawn", training={"maxSteps": 1000})
    group.plan(long, short, withdrawn)
    report = group.wait_for(
        lambda report: any(
            task.uid == short.uid and task.phase is TaskPhase.SUCCEEDED for task in report.tasks
        )
    )
    assert {task.uid for task in report.tasks} == {long.uid, short.uid, withdrawn.uid}
    reports = group.finish(long, short)
    assert [report.phase for report in reports.values()] == [TaskPhase.SUCCEEDED] * 2
    assert reports["long"].step == 60
    group.wait_for(lambda report: {task.uid for task in report.tasks} == {long.uid, short.uid})
    assert_timeline(group, long, short)


def assert_timeline(group: Group, long: TaskPlan, short: TaskPlan) -> None:
    """Both stages say what they did; every microbatch went down and came back, on one clock."""
    assert group.call("GET", "/v1/timeline", token="wrong")[0] == 401
    status, text = group.call("GET", "/v1/timeline")
    assert status == 200, text
    timeline = Timeline.model_validate_json(text)
    assert timeline.stages == 2
    assert timeline.names[long.uid] == f"{long.namespace}/{long.name}"
    assert {(span.stage, span.kind) for span in timeline.spans} == {
        (stage, kind) for stage in (0, 1) for kind in ("forward", "backward", "update")
    }
    spans = {(span.stage, span.kind, span.number): span for span in timeline.spans}
    down = [span for span in timeline.spans if span.kind == "forward" and span.stage == 0]
    assert len([span for span in down if long.uid in span.tasks]) >= 60
    assert any(short.uid in span.tasks for span in down)
    for first in down:
        way = [
            first,
            *(
                spans[stage, kind, first.number]
                for stage, kind in ((1, "forward"), (1, "backward"), (0, "backward"))
            ),
        ]
        assert all(before.end <= after.start for before, after in pairwise(way))


def test_a_task_that_loses_its_place_waits_and_trains_on(two_stages: Group, make_task: MakeTask) -> None:
    group = two_stages
    task = make_task("preempted", training={"maxSteps": 200, "checkpointEverySteps": 0})
    group.plan(task)
    group.wait_for(lambda report: report.tasks[0].step >= 2)
    group.plan(task.model_copy(update={"admitted": False}))
    report = group.wait_for(lambda report: report.tasks[0].phase is TaskPhase.PREEMPTED)
    stopped = report.tasks[0].step
    assert report.tasks[0].checkpoint_step == stopped
    finished = group.finish(task)["preempted"]
    assert (finished.phase, finished.step, finished.resumed_step) == (TaskPhase.SUCCEEDED, 200, stopped)
    checkpoints = Path(task.output_uri.removeprefix("file://"), "checkpoints")
    group.until(lambda: not checkpoints.exists(), "its checkpoints are removed", seconds=30)


BAD = {
    "no-file": ({"dataset": {"uri": "file:///nowhere/rows.jsonl"}}, FailureReason.DATASET_NOT_FOUND, "rows.jsonl"),
    "bad-row": ({"dataset": {"inline": '{"prompt": "a"}\nnot json'}}, FailureReason.INVALID_ROW, "line 2"),
    "no-answer": ({"dataset": {"inline": '{"prompt": "a", "completion": ""}'}}, FailureReason.NO_TRAINABLE_ROWS, ""),
    "typo": ({"lora": {"targetModules": ["q_proj", "qproj"]}}, FailureReason.UNKNOWN_TARGET_MODULE, "gate_proj"),
    "too-long": ({"training": {"maxSeqLength": 100000}}, FailureReason.INVALID_SPEC, "512"),
}  # fmt: skip


def test_bad_input_fails_its_task_and_nobody_else(two_stages: Group, make_task: MakeTask) -> None:
    good = make_task("good")
    bad = {name: make_task(name, **changes) for name, (changes, _, _) in BAD.items()}
    reports = two_stages.finish(good, *bad.values())
    assert reports["good"].phase is TaskPhase.SUCCEEDED
    for name, (_, reason, words) in BAD.items():
        failure = reports[name].failure
        assert failure is not None, name
        assert failure.reason is reason, (name, failure)
        assert words in failure.message, (name, failure)
        output = Path(bad[name].output_uri.removeprefix("file://"))
        assert not any(path.is_file() for path in output.rglob("*")), "nothing below the output prefix"


def test_memory_that_runs_out_on_a_rank_ends_neither_task_nor_group(
    two_stages: Group, make_task: MakeTask, tmp_path: Path
) -> None:
    """Rank 1 may grow by 32 MiB. Of a step of 32,768 tokens, the microbatches of 4,096 need more."""
    group, limit = two_stages, resource.RLIMIT_DATA
    steps = {"maxSteps": 30}
    alone = make_task("calm", training=steps, uid="calm-alone", outputUri=f"file://{tmp_path}/alone")
    assert group.finish(alone)["calm"].phase is TaskPhase.SUCCEEDED
    rows = tmp_path / "long.jsonl"
    row = {"prompt": "Say it.", "completion": "how many clips did Natalia sell? " * 200}
    rows.write_text("\n".join([json.dumps(row)] * 64))
    hungry = make_task(
        "hungry",
        dataset={"uri": f"file://{rows}"},
        training={"batchSize": 64, "maxSteps": 1, "maxSeqLength": 512},
    )
    calm, process = make_task("calm", training=steps), group.ranks[1]
    before = group.report().run_id
    usual = resource.prlimit(process.pid, limit)
    try:
        resource.prlimit(process.pid, limit, (data_size(process.pid) + 32 * 2**20, usual[1]))
        reports = group.finish(calm, hungry)
    finally:
        resource.prlimit(process.pid, limit, usual)
    assert [reports[name].phase for name in ("calm", "hungry")] == [TaskPhase.SUCCEEDED] * 2, reports
    assert group.report().run_id == before
    assert "can't allocate memory" in (group.folder / "rank-1.log").read_text()
    assert "microbatches of test/hungry are limited to" in (group.folder / "rank-0.log").read_text()
    assert relative_difference(weights_of(alone), weights_of(calm)) < 1e-5


def data_size(pid: int) -> int:
    """Bytes that RLIMIT_DATA counts: unlike the address space, without what malloc has only reserved."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def test_a_lost_rank_restarts_the_group_which_ends_what_was_open_and_never_repeats_what_was_finished(
    two_stages: Group, make_task: MakeTask
) -> None:
    group = two_stages
    finished, open_task = (
        make_task("finished"),
        make_task("open", training={"maxSteps": 100_000, "checkpointEverySteps": 0}),
    )
    adapter = group.finish(finished)["finished"].adapter
    assert adapter is not None
    manifest = Path(finished.output_uri.removeprefix("file://"), "manifest.json")
    written = manifest.stat().st_mtime_ns
    group.plan(open_task)
    first = group.wait_for(lambda report: any(task.step >= 2 for task in report.tasks))

    group.ranks[1].send_signal(signal.SIGKILL)
    assert group.ranks[0].wait(30) == 75, group.logs()
    group.start()

    fewer = open_task.training.model_copy(update={"max_steps": 5})
    reports = group.finish(finished, open_task.model_copy(update={"training": fewer}))
    assert (reports["finished"].phase, reports["finished"].adapter) == (TaskPhase.SUCCEEDED, adapter)
    assert manifest.stat().st_mtime_ns == written
    assert (reports["open"].phase, reports["open"].step) == (TaskPhase.SUCCEEDED, 5)
    last = group.report()
    assert last.run_id != first.run_id
    rows = 5 * fewer.batch_size
    assert last.wire.microbatches <= rows, "only the open task was trained, in one microbatch a row at most"


def test_the_coordinator_refuses_strangers_and_stale_or_broken_plans(two_stages: Group) -> None:
    group = two_stages
    group.plan()
    group.plan()
    assert group.call("GET", "/v1/report", token="wrong")[0] == 401
    assert group.call("GET", "/healthz", token="wrong")[0] == 200
    assert group.call("PUT", "/v1/plan", json.dumps({"generation": 1}))[0] == 409
    status, text = group.call(
        "PUT", "/v1/plan", json.dumps({"generation": group.generation + 1, "tasks": [{"uid": ""}]})
    )
    assert status == 422
    assert "tasks.0" in text
