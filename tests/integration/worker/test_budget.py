"""The hard limit of a rank's memory. Each test limits a child of this process, which nothing else needs."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable

import pytest
import torch

from mlora_worker.pipeline.budget import OWN_GROWTH, limit_memory
from mlora_worker.pipeline.faults import is_out_of_memory
from mlora_worker.runtime.allocator import keep_freed_memory

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")
MIB = 2**20


def in_child(work: Callable[[], object]) -> str:
    """What ``work`` gives, or the name of its exception, from a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(
                1
            )  # threads of a pool that another test began are not in the child: it would wait
            words = str(work())
        except BaseException as error:
            words = type(error).__name__
        os.write(writing, words.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def taken(bytes_: int) -> torch.Tensor:
    return torch.ones(bytes_ // 4)


@pytest.mark.parametrize("budget", [99 * MIB, 100 * MIB])
def test_a_budget_that_the_model_alone_fills_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match="is less than the model's"):
        limit_memory(CPU, budget, resident=100 * MIB)


def test_what_the_budget_leaves_beside_the_model_can_be_taken_and_no_more() -> None:
    def work() -> str:
        assert limit_memory(CPU, 400 * MIB, resident=100 * MIB)
        held = [taken(280 * MIB)]
        try:
            held.append(taken(60 * MIB + OWN_GROWTH))
        except RuntimeError as error:
            return f"out of memory: {is_out_of_memory(error)}"
        return "no limit"

    assert in_child(work) == "out of memory: True"


def test_what_was_freed_before_is_not_counted_against_it() -> None:
    def work() -> str:
        blocks = [torch.ones(4096) for _ in range(5000)]  # of the heap: it keeps them
        blocks[:-1] = []
        limit_memory(CPU, 400 * MIB, resident=100 * MIB)
        blocks += [torch.ones(4096) for _ in range(290 * 64)]  # large ones would need new pages
        return "fits"

    assert in_child(work) == "fits"


def test_small_blocks_that_stay_do_not_cut_up_the_room_of_large_ones() -> None:
    """As tasks that come between microbatches of all sizes do (cf. ``allocator.py``)."""

    def work() -> str:
        keep_freed_memory()  # as a rank does from its beginning
        limit_memory(CPU, 400 * MIB, resident=100 * MIB)
        stay = []
        for size in range(1, 80):
            microbatch = [taken(size * MIB) for _ in range(2)]
            stay.append(torch.ones(64))
            microbatch.append(taken(size * MIB))
            del microbatch
        return "fits"

    assert in_child(work) == "fits"


def test_threads_that_start_later_have_their_stacks() -> None:
    def work() -> int:
        limit_memory(CPU, 101 * MIB, resident=100 * MIB)
        end = threading.Event()
        threads = [threading.Thread(target=end.wait) for _ in range(54)]
        for thread in threads:
            thread.start()
        end.set()
        return len(threads)

    assert in_child(work) == "54"


def test_a_harder_limit_of_the_system_stays() -> None:
    def work() -> bool:
        soft = 20 * 2**30
        resource.setrlimit(resource.RLIMIT_DATA, (soft, soft))
        limit_memory(CPU, 2**50, resident=100 * MIB)
        return resource.getrlimit(resource.RLIMIT_DATA) == (soft, soft)

    assert in_child(work) == "True"
