"""``python -m bench launches``: does a step with eight tasks launch more than one with a single task?

The same rows: once two for each of eight tasks, once all of one task; forward, backward, clipping and AdamW. Counted are
ATen operators that reach a kernel (by a dispatch mode below autograd, views included) together with this project's own
compiled kernels, which torch does not see; and, as a second witness, what torch's profiler has at its top level. With a GPU
also all kernels that it was given.

Two paths: that of this machine's device, and the one that GPUs take. Where there is no GPU, the latter's own kernels are
counted but not run: everything around them runs on the CPU, so only counts have a meaning there.

Last, a layer of an 8B shape in bfloat16, all linear modules adapted, as a GPU would have it (``gpu/absent``): what is
launched for it, and the bytes that it keeps for its backward, with and without the kernels between the products; and how
long the host makes tables for a microbatch of 64 tasks on all of its layers.

Every layer launches the same, so a model cut to a few layers is counted; --long counts the whole one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.base import cut_folder, smollm2_folder, whole_stage
from bench.dispatched import CountOperators
from bench.gpu.absent import layer_costs
from bench.gpu.host import seconds
from bench.options import parser
from bench.ours import Ours
from bench.report import last_line, table
from bench.rows import deal, gsm8k_rows, shortest
from bench.sides import LEARNING_RATE, Setting
from mlora_worker.lora.triton_products import TritonProducts

TASKS, BATCH = 8, 2
HOST_TASKS, HOST_REPETITIONS = 64, 20
LAYERS, QUICK_LAYERS = 6, 2
DEVICE, GPU = "this device", "GPU's kernels"
TARGETS = {"q,k,v,o": ("q_proj", "k_proj", "v_proj", "o_proj"), "all-linear": ("all-linear",)}
# File and function; each call is one kernel, however many threads share it.
COMPILED = {("numba_loops.py", "spread")}


@dataclass(frozen=True)
class Launches:
    """Of one step."""

    dispatched: Counter[str]  # ATen operators by name
    compiled: int  # this project's own kernels
    profiled: int  # the profiler's operators, and this project's own kernels
    kernels: int  # on a GPU

    @property
    def operators(self) -> int:
        return self.dispatched.total() + self.compiled

    def as_json(self) -> dict[str, int]:
        return {
            "operators": self.operators,
            "compiled": self.compiled,
            "profiled": self.profiled,
            "kernels": self.kernels,
        }


def main(arguments: list[str]) -> int:
    options = parser("launches", __doc__).parse_args(arguments)
    torch.set_num_threads(options.threads)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's own messages
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    configs: dict[tuple[str, str], dict[int, Launches]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        whole = smollm2_folder()
        layers = QUICK_LAYERS if options.quick else LAYERS
        folder = whole if options.long else cut_folder(whole, layers, Path(scratch))
        rows = gsm8k_rows(folder)
        batch_of = shortest(rows, TASKS * BATCH) if options.quick else rows
        for path in (DEVICE,) if cuda else (DEVICE, GPU):
            for label, targets in TARGETS.items():
                configs[path, label] = {}
                for tasks in (1, TASKS):
                    launcher = CountLaunches()
                    ours = Ours(
                        whole_stage(folder, torch.float32, device),
                        Setting(tasks, targets),
                        budget=2**30,
                        products=TritonProducts(launch=launcher) if path == GPU else None,
                    )
                    warm = deal(shortest(rows, TASKS), tasks, TASKS // tasks, 0)
                    for _ in range(
                        2
                    ):  # AdamW makes its state in the first update, which rides with the second step
                        ours.step(warm, LEARNING_RATE)
                    batch = deal(batch_of, tasks, BATCH * TASKS // tasks, 0)
                    work = partial(ours.step, batch, LEARNING_RATE)
                    configs[path, label][tasks] = count(work, launcher)
                print(
                    show(f"{label}, {path}", configs[path, label][1], configs[path, label][TASKS]), flush=True
                )
    layer = {"plain": layer_costs("8b", fused=False), "fused": layer_costs("8b")}
    lines = [[name, one.launches, round(one.kept_bytes)] for name, one in layer.items()]
    print(table(["a layer of an 8B shape", "launches", "bytes kept a token"], lines), flush=True)
    first, later = seconds("8b", HOST_TASKS, HOST_REPETITIONS)
    print(
        f"tables of {HOST_TASKS} tasks: {later * 1e3:.1f} ms, {first * 1e3:.1f} ms the first time", flush=True
    )
    ratios = {key: compare(steps[1], steps[TASKS]) for key, steps in configs.items()}

    def largest(path: str) -> float | None:
        kind = "kernels" if cuda else "operators"
        return max((one[kind] for (of, _), one in ratios.items() if of == path), default=None)

    result = {
        "ratio": largest(DEVICE),
        "ratio_gpu_path": largest(DEVICE if cuda else GPU),
        "configs": [
            {
                "targets": label,
                "path": path,
                "ratio": ratios[path, label],
                "launches": {str(tasks): launches.as_json() for tasks, launches in steps.items()},
            }
            for (path, label), steps in configs.items()
        ],
        "layer_8b": {
            name: {"launches": one.launches, "bytes_kept": round(one.kept_bytes)}
            for name, one in layer.items()
        },
        "host_ms": {"tasks": HOST_TASKS, "first": first * 1e3, "later": later * 1e3},
        "device": device.type,
        "tasks": TASKS,
        "batch": BATCH,
    }
    print(last_line("launches", result, repetitions=1, threads=options.threads, quick=options.quick))
    return 0


class CountLaunches:
    """Takes the place of what starts a Triton kernel, and starts none."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        self.number += 1


def count(work: Callable[[], object], launcher: CountLaunches) -> Launches:
    """Runs ``work`` twice: dispatch modes and the profiler would see each other."""
    before = launcher.number
    with count_compiled() as compiled, CountOperators() as operators:
        work()
    own = compiled.total() + launcher.number - before
    profiled, kernels = profiled_events(work)
    return Launches(operators.seen, own, profiled + own, kernels)


@contextmanager
def count_compiled() -> Iterator[Counter[str]]:
    """Calls of the compiled kernels on this thread, by function."""
    seen: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and (os.path.basename(code.co_filename), code.co_name) in COMPILED:  # noqa: PTH119
            seen[code.co_name] += 1

    sys.setprofile(watch)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def profiled_events(work: Callable[[], object]) -> tuple[int, int]:
    """ATen operators that no other one calls, and kernels on a GPU."""
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


def compare(one: Launches, many: Launches) -> dict[str, float]:
    """Each count with eight tasks over that with one."""
    kinds = ("operators", "profiled", *(["kernels"] if one.kernels else []))
    return {kind: many.as_json()[kind] / one.as_json()[kind] for kind in kinds}


def show(label: str, one: Launches, many: Launches) -> str:
    """The counts, and which operators there are more of with eight tasks."""
    rows = [
        [kind, one.as_json()[kind], many.as_json()[kind], ratio] for kind, ratio in compare(one, many).items()
    ]
    more = many.dispatched - one.dispatched
    more["compiled kernels"] = many.compiled - one.compiled
    most = ", ".join(f"{name} +{count}" for name, count in more.most_common(8) if count > 0) or "none"
    return f"{table([label, 'one task', f'{TASKS} tasks', 'ratio'], rows)}\nmore with {TASKS} tasks: {most}\n"
