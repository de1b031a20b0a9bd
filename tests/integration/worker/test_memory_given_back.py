"""Tasks that leave and return within a budget that has room for one of them: nobody fails for what others left behind.

The base is random and small, the adapters are large: some 220 MiB each with gradients and moments, 165 MiB of state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bench.slow_store import SlowStore, slow_store
from mlora_worker.protocol import Report, TaskPhase, TaskPlan, TaskReport
from tests.integration.worker.conftest import Group

pytestmark = pytest.mark.integration

STEPS, RANK = 6, 512
FAST, SLOW = 2e9, 60e6  # bytes a second

MakeTask = Callable[..., TaskPlan]
StartGroup = Callable[..., Group]


@pytest.fixture(scope="module")
def wide_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that an adapter of a large rank is larger than its one layer."""
    folder = tmp_path_factory.mktemp("wide")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(5)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def parameters() -> int:
    """Of the adapter: q, k, v, o are square, gate, up and down are not."""
    return RANK * (4 * (1024 + 1024) + 3 * (1024 + 3072))


@pytest.fixture(scope="module")
def group(start_group: StartGroup, wide_model: Path) -> Iterator[Group]:
    """With room for the model, one task, what the norm of its gradients takes, and a little for its rows."""
    model = (wide_model / "model.safetensors").stat().st_size
    budget = model + (16 + 8) * parameters() + 16 * 2**20
    made = start_group(wide_model, stages=1, memory_budget=budget, microbatch_tokens=64)
    yield made
    made.stop()


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SlowStore]:
    with slow_store(tmp_path / "store", getattr(request, "param", SLOW)) as made:
        yield made


@pytest.fixture
def large(make_task: MakeTask, store: SlowStore) -> Callable[[str], TaskPlan]:
    def make(name: str) -> TaskPlan:
        return make_task(
            f"{name}-{store.server_address[1]}",
            lora={"rank": RANK, "alpha": 8, "targetModules": ["all-linear"]},
            training={"maxSteps": STEPS, "batchSize": 1, "maxSeqLength": 64, "checkpointEverySteps": 0},
            outputUri=f"s3://bucket/{name}",
            storage=store.access.model_dump(mode="json", by_alias=True, exclude_none=True),
        )

    return make


def task_in(report: Report, task: TaskPlan) -> TaskReport:
    return next(one for one in report.tasks if one.uid == task.uid)


def until(group: Group, task: TaskPlan, done: Callable[[TaskReport], bool]) -> TaskReport:
    def is_so(report: Report) -> bool:
        failed = [one for one in report.tasks if one.phase is TaskPhase.FAILED]
        assert not failed, f"{failed}\n{group.logs()}"
        return any(one.uid == task.uid and done(one) for one in report.tasks)

    return task_in(group.wait_for(is_so), task)


def waits(task: TaskPlan) -> TaskPlan:
    return task.model_copy(update={"admitted": False})


@pytest.mark.parametrize("store", [FAST, SLOW], ids=["fast", "slow"], indirect=True)
def test_tasks_that_take_turns_in_the_room_of_one_all_succeed(
    group: Group, large: Callable[[str], TaskPlan]
) -> None:
    """Suspended and resumed, displaced by another one and back, at a store that is fast or slow."""
    one, two = large("one"), large("two")
    group.plan(one, waits(two))
    step = until(group, one, lambda task: task.step >= 1).step
    group.plan(waits(one), waits(two))
    until(group, one, lambda task: task.phase is TaskPhase.PREEMPTED)
    group.plan(one, waits(two))
    until(group, one, lambda task: task.step > step)
    group.plan(waits(one), waits(two))
    until(group, one, lambda task: task.phase is TaskPhase.PREEMPTED)
    group.plan(waits(one), two)
    until(group, two, lambda task: task.phase is TaskPhase.SUCCEEDED)
    group.plan(one, two)
    assert until(group, one, lambda task: task.phase is TaskPhase.SUCCEEDED).step == STEPS
    assert "ran out" not in group.logs()
    group.plan()


def test_two_that_leave_at_once_make_room_for_a_third_that_needs_all_of_it(
    group: Group, large: Callable[[str], TaskPlan]
) -> None:
    """And come back together once it has left."""
    whole = large("whole")
    half = whole.lora.model_copy(update={"rank": RANK // 2})
    halves = [large(name).model_copy(update={"lora": half}) for name in ("left", "right")]
    group.plan(*halves, waits(whole))
    for task in halves:
        until(group, task, lambda task: task.step >= 1)
    group.plan(*map(waits, halves), waits(whole))
    for task in halves:
        until(group, task, lambda task: task.phase is TaskPhase.PREEMPTED)
    group.plan(*map(waits, halves), whole)
    until(group, whole, lambda task: task.phase is TaskPhase.SUCCEEDED)
    group.plan(*halves, whole)
    for task in halves:
        assert until(group, task, lambda task: task.phase is TaskPhase.SUCCEEDED).step == STEPS
    assert "ran out" not in group.logs()
    group.plan()
