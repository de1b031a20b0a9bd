"""Lost, late and repeated requests, restarted operators, two at once, dying workers: nothing of it may show.

Stories are drawn at random; each is named by its seed.
"""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlora_operator.reconcile.state.snapshot import Key
from tests.fixtures.faulty_world import Operator, World, tick
from tests.fixtures.stories import stories

TASKS = ("t1", "t2", "t3")
seeds = st.integers(0, 2**32)
quick = settings(
    max_examples=stories(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def less_to_write(caplog: pytest.LogCaptureFixture) -> None:
    """Each lost write is a warning, and there are thousands."""
    caplog.set_level(logging.ERROR, logger="mlora_operator")


def world_of(make: Any, seed: int, tasks: tuple[str, ...] = TASKS) -> World:
    world = World(Random(seed), make.now, make.raw_pipeline(restarts={"limit": 1000}))
    for name in tasks:
        world.add("LoRATask", make.raw_task(name, priority=world.random.randrange(3)))
    return world


async def story(world: World, make: Any, operators: int, crashes: int, length: int = 90) -> None:
    """Operators look, are replaced, and tasks go on, in any order."""
    present = [Operator(world, make.settings()) for _ in range(operators)]
    for _ in range(length):
        match world.random.randrange(10):
            case 0 | 1 | 2 | 3:
                await world.random.choice(present).look()
            case 4 | 5 | 6:
                world.advance()
            case 7:
                world.deliver()
            case 8:
                present[world.random.randrange(operators)] = Operator(world, make.settings())
            case _ if crashes and world.coordinator is not None and not world.random.randrange(3):
                crashes -= 1
                world.crash()
        tick(world, world.random.choice((0.1, 1, 6)))


async def quiet_end(world: World, make: Any) -> None:
    """The network is well again; what was late arrives; one operator is left."""
    while world.late:
        world.deliver()
    world.faulty = False
    last = Operator(world, make.settings())
    for _ in range(60):
        assert await last.look()
        if len(world.api.finished()) == len(TASKS):
            break
        for _ in range(6):
            world.advance()
        tick(world)
    assert await last.look()


@pytest.mark.parametrize("operators", [1, 2])
@quick
@given(seed=seeds)
async def test_whatever_is_lost_each_task_is_trained_once_and_ends_for_good(
    make: Any, operators: int, seed: int
) -> None:
    world = world_of(make, seed)
    await story(world, make, operators, crashes=0)
    await quiet_end(world, make)
    assert world.judge() == []
    assert {
        name: world.api.status("LoRATask", Key("team-a", name))["state"] for name in TASKS
    } == dict.fromkeys(TASKS, "Succeeded")
    assert world.published == dict.fromkeys((f"uid-team-a-{name}" for name in TASKS), 1)


async def test_two_operators_of_one_mind_do_not_answer_each_other_for_ever(make: Any) -> None:
    world = world_of(make, 1)
    world.faulty = False
    both = [Operator(world, make.settings()) for _ in range(2)]
    generations = []
    for number in range(40):
        for one in both:
            assert await one.look()
        if number < 20:
            world.advance()
        tick(world)
        generations.append(world.coordinator.plan.generation if world.coordinator is not None else 0)
    assert generations[-1] == generations[25]
    assert world.judge() == []


@quick
@given(seed=seeds)
async def test_dying_workers_add_runs_but_no_second_adapter(make: Any, seed: int) -> None:
    world = world_of(make, seed)
    await story(world, make, 2, crashes=4, length=140)
    await quiet_end(world, make)
    assert world.judge() == []
    assert {world.api.status("LoRATask", Key("team-a", name))["state"] for name in TASKS} == {"Succeeded"}
    assert set(world.published.values()) == {1}
