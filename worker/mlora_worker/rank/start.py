"""Puts one rank together and runs it until the stream stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from mlora_worker.model.quantisation import freeze_of
from mlora_worker.pipeline.hello import Membership
from mlora_worker.protocol import (
    WorkerConfig,
)
from mlora_worker.rank.first import FirstRank
from mlora_worker.rank.later import run_later_rank
from mlora_worker.runtime.allocator import give_back_freed_memory, keep_freed_memory
from mlora_worker.runtime.termination import Termination


def run_rank(
    config: WorkerConfig, rank: int, termination: Termination, leave: Callable[[Exception], None]
) -> None:
    """Run until the stream stops. When asked to end, the group saves what it has done first. ``leave`` ends the process at
    once, with nothing to save.

    Raises ``LinkClosed`` when a peer is lost, other errors when this rank fails.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.model.quantization is not None:
        freeze_of(config.model.quantization)  # what cannot be done ends this rank before anything is read
    device = choose_device(config.device)
    if device.type == "cpu":
        # With a budget from the beginning: what a calibration frees would else stay in the heap, of no use to large blocks.
        (keep_freed_memory if config.memory_budget is None else give_back_freed_memory)()
    group = Membership(config.pipeline, config.stages, lambda: Path(config.token_file).read_text().strip())
    group.key()  # a token that cannot be used ends this rank at once
    if rank == 0:
        FirstRank(config, device, group, leave).run(termination)
    else:
        run_later_rank(config, rank, device, group, termination)


def choose_device(wish: str) -> torch.device:
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
