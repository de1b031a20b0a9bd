"""``python -m bench launches``: does a step with eight tasks dispatch more operators than one with a single task?

The same rows: once one for each of eight tasks, once all of one task; forward, backward, clipping and AdamW. Two counts:
ATen operators that reach a kernel (by a dispatch mode below autograd, views included), and the events that torch's
profiler sees at its top level. On a GPU the kernels that it launches are counted, too.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bench.base import cut_folder, smollm2_folder, whole_stage
from bench.options import parser
from bench.ours import Ours
from bench.report import last_line, table
from bench.rows import Batch, deal, gsm8k_rows, shortest
from bench.sides import LEARNING_RATE, Setting

TASKS = 8
TARGETS = {"q,k,v,o": ("q_proj", "k_proj", "v_proj", "o_proj"), "all-linear": ("all-linear",)}
COUNTS = ("dispatched", "profiled", "kernels")


class CountOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts by name what is dispatched on this thread: on the CPU, backward runs on it, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def main(arguments: list[str]) -> int:
    options = parser("launches", __doc__).parse_args(arguments)
    torch.set_num_threads(options.threads)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's own messages
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as scratch:
        folder = cut_folder(smollm2_folder(), 2, Path(scratch)) if options.quick else smollm2_folder()
        rows = gsm8k_rows(folder)
        configs = {}
        for label, targets in TARGETS.items():
            steps = {}
            for tasks in (1, TASKS):
                ours = Ours(whole_stage(folder, torch.float32), Setting(tasks, targets), budget=2**30)
                first = deal(shortest(rows, TASKS), tasks, TASKS // tasks, 0)
                for _ in range(
                    2
                ):  # AdamW makes its state in the first update, which rides with the second step
                    ours.step(first, LEARNING_RATE)
                batch = first if options.quick else deal(rows, tasks, TASKS // tasks, 0)
                steps[tasks] = count_step(ours, batch)
            configs[label] = steps
            print(show(label, steps, cuda), flush=True)
    ratios = {
        label: {
            kind: steps[TASKS][0][kind] / steps[1][0][kind] for kind in COUNTS if cuda or kind != "kernels"
        }
        for label, steps in configs.items()
    }
    result = {
        "ratio": max(ratio["dispatched"] for ratio in ratios.values()),
        "configs": {
            label: {"ratio": ratios[label], **{str(tasks): counts for tasks, (counts, _) in steps.items()}}
            for label, steps in configs.items()
        },
        "tasks": TASKS,
    }
    print(last_line("launches", result, repetitions=1, threads=options.threads, quick=options.quick))
    return 0


def count_step(ours: Ours, batch: Batch) -> tuple[dict[str, int], Counter[str]]:
    """All counts of a step, and the dispatched operators by name."""
    with CountOperators() as operators:
        ours.step(batch, LEARNING_RATE)
    profiled, kernels = profiled_events(lambda: ours.step(batch, LEARNING_RATE))
    return {"dispatched": operators.seen.total(), "profiled": profiled, "kernels": kernels}, operators.seen


def profiled_events(work: Callable[[], object]) -> tuple[int, int]:
    """Events on the CPU that no other one contains, and kernels on a GPU."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        work()
    events = profiler.events()
    assert events is not None
    kernels = sum(event.device_type is DeviceType.CUDA for event in events)
    aten = [event for event in events if event.name.startswith("aten::")]
    inner = {id(child) for event in aten for child in event.cpu_children}
    return sum(id(event) not in inner for event in aten), kernels


def show(label: str, steps: dict[int, tuple[dict[str, int], Counter[str]]], cuda: bool) -> str:
    """The counts, and which operators there are more of with eight tasks."""
    kinds = [kind for kind in COUNTS if cuda or kind != "kernels"]
    rows = [
        [kind, steps[1][0][kind], steps[TASKS][0][kind], steps[TASKS][0][kind] / steps[1][0][kind]]
        for kind in kinds
    ]
    more = steps[TASKS][1] - steps[1][1]
    most = ", ".join(f"{name} +{count}" for name, count in more.most_common(8)) or "none"
    return f"{table([label, 'one task', f'{TASKS} tasks', 'ratio'], rows)}\nmore with {TASKS} tasks: {most}\n"
