"""``python -m bench roofline``: how long a training step must take on a GPU, computed and not measured.

From the shape of a model and a device's data sheet: the time of each part of a step (the longer of its arithmetic and its
memory traffic), as the code is today and with its element-wise work fused. No part overlaps another. ``--matrix`` and
``--memory`` say which shares of the two peaks a kernel reaches: these are assumptions, 0.70 and 0.85 unless given.

``tokens_per_second``        as today
``tokens_per_second_fused``  with element-wise work fused
``of_peak_fused``            useful arithmetic of that over the device's peak
``host_us_per_launch``       what the host may take for a launch before the device waits for it, fused
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.options import parser
from bench.report import last_line, table
from bench.roofline.devices import DEVICES, Device
from bench.roofline.parts import SHAPES, Part, Shape, Work, parts, useful_flops

GOAL = 17_000.0  # tokens/s of an 8B shape on an H100, all linear modules, rank 16
LORAFUSION = (13_900.0, 15_000.0)  # published: tokens/s of 8B on one H100
MATRIX, MEMORY = 0.70, 0.85


def main(arguments: list[str]) -> int:
    made = parser("roofline", __doc__)
    made.add_argument("--device", choices=sorted(DEVICES), default="h100")
    made.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    made.add_argument("--rows", type=int, default=64, help="of a step, all tasks together (default: 64)")
    made.add_argument("--length", type=int, default=222, help="tokens of a row (default: 222, as GSM8K's)")
    made.add_argument("--supervised", type=float, default=0.59, help="share of the tokens (default: 0.59)")
    made.add_argument("--tasks", type=int, default=4)
    made.add_argument("--rank", type=int, default=16)
    made.add_argument(
        "--matrix", type=float, default=MATRIX, help="share of peak arithmetic (default: %(default)s)"
    )
    made.add_argument(
        "--memory", type=float, default=MEMORY, help="share of peak bandwidth (default: %(default)s)"
    )
    options = made.parse_args(arguments)
    device, shape = DEVICES[options.device], SHAPES[options.shape]
    work = Work(options.rows, options.length, options.supervised, options.tasks, options.rank)
    figures = {
        "device": options.device,
        "shape": options.shape,
        **figures_of(device, shape, work, options.matrix, options.memory),
        "assumed": {"matrix": options.matrix, "memory": options.memory},
        "computed": True,
    }
    if (options.shape, options.device) == ("8b", "h100"):
        figures |= {"goal": GOAL, "lorafusion": LORAFUSION}
    print(last_line("roofline", figures, repetitions=1, threads=1, quick=options.quick))
    return 0


def figures_of(device: Device, shape: Shape, work: Work, matrix: float, memory: float) -> dict[str, object]:
    """The JSON line's; prints the table of the parts."""
    today, fused = parts(shape, work, fused=False), parts(shape, work, fused=True)
    before, after = _seconds(today, device, matrix, memory), _seconds(fused, device, matrix, memory)
    rows = [
        (one.name, one.flops / 1e12, one.bytes / 1e9, was * 1e3, now * 1e3, one.launches, other.launches)
        for one, other, was, now in zip(today, fused, before, after, strict=True)
    ]
    head = ("part", "Tflop", "GB today", "ms today", "ms fused", "launches today", "fused")
    print(table(head, rows))
    launches = sum(one.launches for one in fused)
    return {
        "tokens": work.tokens,
        "tokens_per_second": work.tokens / sum(before),
        "tokens_per_second_fused": work.tokens / sum(after),
        "of_peak": useful_flops(shape, work) / sum(before) / device.flops,
        "of_peak_fused": useful_flops(shape, work) / sum(after) / device.flops,
        "elementwise_share": _share(today, before),
        "elementwise_share_fused": _share(fused, after),
        "launches": sum(one.launches for one in today),
        "launches_fused": launches,
        "host_us_per_launch": sum(after) / launches * 1e6,
    }


def _seconds(of: Sequence[Part], device: Device, matrix: float, memory: float) -> list[float]:
    return [one.seconds(device, matrix, memory) for one in of]


def _share(of: Sequence[Part], seconds: Sequence[float]) -> float:
    """Of the step, what has no arithmetic to speak of."""
    return sum(took for one, took in zip(of, seconds, strict=True) if not one.flops) / sum(seconds)
