"""A task's result does not depend on who trains beside it.

Everything is real: the dispatcher groups the tasks, packs their rows into microbatches and cuts steps as its plan says,
which differs with the company.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlora_worker.protocol import LoRAConfig, Schedule, Training
from tests.equivalence.tasks import Base, Row, Task, Trained, assert_same, train

STEPS = 50
ALL = ("all-linear",)


def tasks(rows: Callable[..., list[Row]]) -> list[Task]:
    """The subject first, then seven neighbours of other ranks, alpha, dropout, targets, lengths, batches, and ends."""
    subject = LoRAConfig(
        rank=8, alpha=16, dropout=0.1, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")
    )
    training = Training(
        batch_size=4, learning_rate=2e-3, schedule=Schedule.COSINE, warmup_steps=5, max_grad_norm=0.5, seed=11
    )
    wide = LoRAConfig(rank=20, alpha=8, dropout=0.3, target_modules=ALL)
    narrow = LoRAConfig(rank=1, alpha=4, target_modules=("down_proj",))
    twin = LoRAConfig(rank=8, alpha=16, target_modules=("q_proj", "v_proj"))
    feed = LoRAConfig(rank=3, alpha=7, dropout=0.05, target_modules=("gate_proj", "up_proj"))
    one = Training(batch_size=1, learning_rate=1e-3, max_grad_norm=0.0, seed=4)
    fast = Training(batch_size=3, gradient_accumulation_steps=2, learning_rate=5e-3, seed=3, weight_decay=0.1)
    return [
        Task("subject", subject, training, rows(22, 1), STEPS),
        Task("wide", wide, fast, rows(10, 2, 20, 60), STEPS - 20),
        Task("narrow", narrow, one, rows(5, 3, 2, 4), STEPS - 10),
        Task("twin", twin, training, rows(22, 4), STEPS),
        Task("feed", feed, one, rows(9, 5, 30, 31), STEPS - 7),
        Task("short", twin, fast, rows(40, 6, 2, 6), STEPS - 40),
        Task("same-rows", subject, training, rows(22, 1), STEPS - 30),
        Task("long", narrow, one, rows(2, 7, 100, 120), STEPS - 25),
    ]


@pytest.fixture(scope="module")
def alone(base: Base, rows: Callable[..., list[Row]]) -> Callable[[str], Trained]:
    """``alone(name)``: the task by itself on one stage, each step one microbatch; trained once."""
    trained: dict[str, Trained] = {}

    def of(name: str) -> Trained:
        if name not in trained:
            (task,) = (task for task in tasks(rows) if task.name == name)
            trained.update(train(base, 1, [task]))
            assert set(trained[name].microbatches) == {1}
        return trained[name]

    return of


@pytest.mark.parametrize(("neighbours", "stages", "budget"), [(1, 2, 150), (3, 1, 200), (7, 1, 10_000)])
def test_a_task_beside_neighbours_equals_itself_alone(
    base: Base,
    rows: Callable[..., list[Row]],
    alone: Callable[[str], Trained],
    neighbours: int,
    stages: int,
    budget: int,
) -> None:
    company = tasks(rows)[1 : 1 + neighbours]
    together = train(base, stages, [*company[:1], tasks(rows)[0], *company[1:]], budget=budget)
    for name in ("subject", *(task.name for task in company[:3])):
        assert_same(together[name], alone(name), losses=1e-6, weights=1e-5)


def test_three_adapters_all_learn_in_every_module_and_each_as_if_alone(
    base: Base, rows: Callable[..., list[Row]]
) -> None:
    """Two of equal shape and one of another; five steps. ``train`` sees to it that the base stays as it is."""
    lora = LoRAConfig(rank=8, alpha=16, target_modules=("q_proj", "v_proj"))
    other = LoRAConfig(rank=2, alpha=3, target_modules=("k_proj", "o_proj", "gate_proj", "down_proj"))
    training = Training(batch_size=4, learning_rate=1e-3, seed=1)
    three = [
        Task("first", lora, training, rows(20, 1), 5),
        Task("second", lora, training, rows(20, 2), 5),
        Task("third", other, training, rows(20, 3), 5),
    ]
    trained = train(base, 2, three)
    for task in three:
        adapter = trained[task.name].adapter
        assert len(adapter) == 3 * len(task.lora.target_modules) * 2
        assert all(tensor.isfinite().all() for tensor in adapter.values())
        assert all(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
        assert_same(trained[task.name], train(base, 2, [task])[task.name], losses=1e-6, weights=1e-5)
    assert any(
        (trained["first"].adapter[name] != tensor).any() for name, tensor in trained["second"].adapter.items()
    )
