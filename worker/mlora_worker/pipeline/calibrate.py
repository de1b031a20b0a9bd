"""A few made-up microbatches through one stage before it serves: first samples of its memory.

Each rank measures its own stage by itself, with random tokens or hidden states in the place of what a neighbour would send.
An adapter of its own is loaded and unloaded again, random numbers come from a generator of its own: no task can notice. The
compiled kernels of a CPU are ready afterwards, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch

from mlora_worker.pipeline.faults import is_fatal, is_out_of_memory, recover
from mlora_worker.pipeline.metered import MeteredEngine
from mlora_worker.protocol import LoRAConfig, Training
from mlora_worker.stream.items import Load, Segment, Train
from mlora_worker.stream.targets import EVERY_LINEAR

log = logging.getLogger(__name__)

TASK = "calibration"  # no uid of an object looks like this
_SECONDS = 5.0  # after which no further microbatch is begun
_LORA = LoRAConfig(rank=8, alpha=8, target_modules=(EVERY_LINEAR,))
# Rows and tokens of each, on a CPU: widths and row lengths that do not grow alike.
_ROWS = ((2, 16), (1, 64), (4, 24), (2, 80), (1, 256))
_FIRST = -1_000_000  # item numbers that the stream never uses


def calibrate(
    engine: MeteredEngine, microbatch_tokens: int, clock: Callable[[], float] = time.monotonic
) -> int:
    """Give how many microbatches were measured. What goes wrong is logged, and ends the calibration only. Raises what the
    rank does not survive."""
    started, done = clock(), 0
    generator = torch.Generator().manual_seed(0)
    number = _FIRST
    engine.calibrates = True
    try:
        engine.load(Load(number=number, task=TASK, lora=_LORA, training=Training()))
        for number, lengths in enumerate(_shapes(engine, microbatch_tokens), start=_FIRST):
            if clock() - started > _SECONDS:
                break
            _measure(engine, number, lengths, generator)
            done += 1
    except Exception as error:
        if is_fatal(error):
            raise
        why = "memory ran out" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
        log.warning("calibration ended after %d microbatches: %s", done, why)
    finally:
        engine.calibrates = False
        engine.abandon(number)
        engine.unload(TASK)
    recover(engine.stage.device)
    log.info("calibration: %d microbatches in %.1f s", done, clock() - started)
    return done


def _shapes(engine: MeteredEngine, microbatch_tokens: int) -> Iterator[tuple[int, ...]]:
    """Lengths of the rows. A GPU does the widest microbatch in no time; on a CPU it would take a minute."""
    longest = engine.longest_row
    if engine.stage.device.type == "cuda":
        for parts, rows in ((16, 1), (8, 4), (4, 1), (2, 8), (1, 4)):
            row = max(2, min(longest, microbatch_tokens // parts // rows))
            yield (row,) * rows
        return
    for rows, row in _ROWS:
        lengths = (min(row, longest),) * rows
        if sum(lengths) <= max(microbatch_tokens, longest):
            yield lengths


def _measure(
    engine: MeteredEngine, number: int, lengths: tuple[int, ...], generator: torch.Generator
) -> None:
    stage, tokens = engine.stage, sum(lengths)
    segment = Segment(task=TASK, step=1, lengths=lengths, first_row=0, weight=1 / tokens, closes_step=True)
    ids = torch.randint(stage.architecture.vocab_size, (tokens,), generator=generator)
    labels = ids.clone()
    labels[: tokens // 3] = -100

    def states(width: int) -> torch.Tensor:
        return torch.randn(tokens, width, generator=generator).to(stage.device, stage.dtype)

    engine.forward(
        Train(number=number, segments=(segment,)),
        token_ids=ids if stage.first else None,
        hidden=None if stage.first else states(stage.entering.width),
        labels=labels if stage.last else None,
    )
    engine.backward(number, None if stage.last else states(stage.leaving.learnt))
