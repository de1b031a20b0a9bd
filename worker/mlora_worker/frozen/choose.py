"""Which library multiplies with the frozen weights of a stage: the fastest one here that is exact enough.

The candidates are timed for some milliseconds on matrices of the stage's own shapes. Results of two libraries differ in
their last bits, so the choice must be the same at the next start and on the next rank. Seen are libraries that are alike,
and oneDNN at more than twice the other's speed, so both bounds are far from what is measured. Where oneDNN multiplies the
rows of all tasks at once and torch each task's by themselves, alike is enough: that saves a tenth of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.onednn import OneDnnWeight, available, joins_rows
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.frozen.weight import FrozenWeight

PLAIN, ONEDNN = PlainWeight.library, OneDnnWeight.library
# Times the speed of the plain way, for the other one to be taken: where it joins the rows of all tasks, and where not.
_JOINING, _CUTTING = 0.8, 1.3
_ROWS = 192
_CHECKED = 8  # of them are held against the exact product
_LARGEST = 2048  # rows and columns of a matrix that is timed: a part of a larger one behaves like it
_TRIES = 4  # the fastest counts
# Largest error of a product, over its largest element. Plain products have 1e-6 and 4e-3.
_EXACT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

Shapes = Mapping[tuple[int, int], int]  # of the matrices [out, in], with how many there are
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Chosen:
    name: str
    freeze: Freeze
    why: str  # for the log


def choose(
    shapes: Shapes, dtype: torch.dtype, device: torch.device, *, room: bool, clock: Clock = time.thread_time
) -> Chosen:
    """``room``: there is memory for the library's kernels (``stream.libraries``). ``clock``: of processor time, so that
    what else the machine does cannot change the choice."""
    why = no_choice(dtype, device)
    if why is not None:
        return plainly(why)
    if not room:
        return plainly("oneDNN's kernels would take too much of the memory, or there are few weights")
    seconds = {PLAIN: 0.0, ONEDNN: 0.0}
    for (outputs, inputs), count in shapes.items():
        matrix, x, wanted = _example(min(outputs, _LARGEST), min(inputs, _LARGEST), dtype)
        whole = count * (outputs * inputs) / matrix.numel()
        plain, other = PlainWeight(matrix), OneDnnWeight(matrix)
        error = _error(other.multiplier(dtype).times(x), wanted)
        if error > _EXACT[dtype]:
            return plainly(f"oneDNN's products differ by {error:.1e} here")
        for name, once in _seconds({PLAIN: plain, ONEDNN: other}, x, clock).items():
            seconds[name] += whole * once
    gain = seconds[PLAIN] / seconds[ONEDNN]
    if gain < (_JOINING if joins_rows(dtype) else _CUTTING):
        return plainly(f"oneDNN's are {gain:.2f} times as fast here, which is not worth their memory")
    return Chosen(ONEDNN, OneDnnWeight, f"they are {gain:.2f} times as fast here as torch's own")


def no_choice(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the plain way is the only one, whatever the shapes are; None: there is a choice."""
    if device.type != "cpu":
        return "it is the device's own"
    if not available(dtype):
        return f"oneDNN does not multiply {_name(dtype)} on this processor"
    return None


def plainly(why: str) -> Chosen:
    return Chosen(PLAIN, PlainWeight, why)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _example(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix, rows, and their product as exactly as it can be."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(outputs, inputs, generator=generator).to(dtype)
    x = torch.randn(_ROWS, inputs, generator=generator).to(dtype)
    return matrix, x, x[:_CHECKED].double() @ matrix.double().T


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found[: len(wanted)].double() - wanted).abs().max() / wanted.abs().max())


def _seconds(weights: Mapping[str, FrozenWeight], x: Tensor, clock: Clock) -> dict[str, float]:
    """Of both products, by turns, so that a cache which others fill hits all alike. The first round, which makes kernels,
    does not count."""
    found = dict.fromkeys(weights, float("inf"))
    for turn in range(1 + _TRIES):
        for name, weight in weights.items():
            began = clock()
            multiplier = weight.multiplier(x.dtype)
            multiplier.back(multiplier.times(x))
            took = clock() - began
            if turn:
                found[name] = min(found[name], took)
    return found
