"""A stage engine that measures some of its microbatches and tells what they took of the memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mlora_worker.lora.groups import Products
from mlora_worker.model.loss import supervised_together
from mlora_worker.model.stage import Stage
from mlora_worker.pipeline.allocations import Ledger, bytes_of, ledger_for, resident_set_bytes
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.pipeline.results import Backwarded, Forwarded
from mlora_worker.protocol import MemorySample
from mlora_worker.runtime.precision import product_dtype
from mlora_worker.storage.artifacts.aside import Aside
from mlora_worker.stream.footprint import (
    exact_parts,
    floor_bytes,
    input_groups,
    loss_rows,
    lowest_adapted,
)
from mlora_worker.stream.items import Train
from mlora_worker.stream.targets import kept_of

OnSample = Callable[[MemorySample], None]

_FIRST = 6  # microbatches measured in a row at the start
_WIDER = 1.15  # one that is so much wider than all before is measured, too
_EVERY = 64  # and, unless told otherwise, each 64th, for what changes with time

# Torch's profiler, which counts for us on the CPU, would write lines of its own into the log.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def group_names(groups: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """A layer's modules that read the same input, by their paths in it, in the order of their calls. ``groups``: paths of
    the modules of each group, of all layers (``Stage.input_groups``)."""
    return tuple(dict.fromkeys(tuple(_inside(path) for path in group) for group in groups))


def _inside(path: str) -> str:
    """model.layers.3.self_attn.q_proj -> self_attn.q_proj"""
    parts = path.split(".")
    return ".".join(parts[next(at for at, part in enumerate(parts) if part.isdigit()) + 1 :])


@dataclass(slots=True)
class Sampling:
    """Which microbatches are measured. Pure but for its counts."""

    every: int = _EVERY
    seen: int = 0
    widest: int = 0  # tokens of the widest one that was measured

    def takes(self, tokens: int) -> bool:
        self.seen += 1
        wider = tokens > _WIDER * self.widest
        if not (self.seen <= _FIRST or wider or self.seen % self.every == 0):
            return False
        self.widest = max(self.widest, tokens)
        return True


@dataclass(slots=True)
class _Measured:
    """A microbatch that is being measured, between its forward and its backward."""

    ledger: Ledger
    input_bytes: int  # of its hidden states, which came from outside
    used_bytes: int | None  # at most so far, on the whole stage; None: not known
    seconds: float

    @property
    def kept_bytes(self) -> int:
        return self.input_bytes + self.ledger.held

    sample: MemorySample


class MeteredEngine(StageEngine):
    """``deliver`` gets a sample of each measured microbatch at the end of its backward."""

    def __init__(
        self,
        stage: Stage,
        deliver: OnSample,
        *,
        recompute: bool = False,
        products: Products | None = None,
        sampling: Sampling | None = None,
        aside: Aside | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(stage, recompute=recompute, products=products, aside=aside)
        self._deliver, self._clock = deliver, clock
        self._sampling = sampling if sampling is not None else Sampling()
        self._measured: dict[int, _Measured] = {}
        self.group_names = group_names(group.paths for group in self._groups)
        self._input_groups = input_groups(self._facts, stage.index, self.group_names)
        self.measures_all = self.calibrates = False  # ``calibrates`` also marks the samples

    @property
    def longest_row(self) -> int:
        """Tokens that the model knows positions for."""
        return self._facts.max_positions

    def forward(
        self, item: Train, *, token_ids: Tensor | None, hidden: Tensor | None, labels: Tensor | None
    ) -> Forwarded:
        if not (self.measures_all or self.calibrates or self._sampling.takes(item.tokens)):
            return super().forward(item, token_ids=token_ids, hidden=hidden, labels=labels)
        ledger, started, beside = ledger_for(self.stage.device), self._clock(), self._bytes_beside()
        with ledger.follow("forward"):
            out = super().forward(item, token_ids=token_ids, hidden=hidden, labels=labels)
        if ledger.complete:
            own = bytes_of(hidden)
            most = own + ledger.peak("forward")
            rows = max((one.rows_at_once for one in self.stage.experts.values()), default=0)
            sample = self._sample(item, labels).model_copy(
                update={
                    "kept_bytes": own + ledger.held,
                    "forward_bytes": most,
                    "expert_rows": rows or None,
                }
            )
            used = _used(ledger, beside, most)
            self._measured[item.number] = _Measured(ledger, own, used, self._clock() - started, sample)
        return out

    def backward(self, number: int, grad: Tensor | None) -> Backwarded:
        measured = self._measured.pop(number, None)
        if measured is None:
            return super().backward(number, grad)
        ledger, started, beside = measured.ledger, self._clock(), self._bytes_beside(number)
        with ledger.follow("backward"):
            out = super().backward(number, grad)
        if ledger.complete:
            most = measured.input_bytes + bytes_of(grad) + ledger.peak("backward")
            seconds = measured.seconds + self._clock() - started
            used = _used(ledger, beside, most)
            self._deliver(
                measured.sample.model_copy(
                    update={
                        "backward_bytes": most,
                        "seconds": round(seconds, 6),
                        "rss_bytes": resident_set_bytes(),
                        "used_bytes": max(used, measured.used_bytes)
                        if used is not None and measured.used_bytes is not None
                        else 0,
                    }
                )
            )
        return out

    def abandon(self, number: int) -> None:
        self._measured.pop(number, None)
        super().abandon(number)

    def _bytes_beside(self, number: int | None = None) -> int | None:
        """What is there beside microbatch ``number``: weights, adapters, other microbatches. None while one of those was
        not measured, so that nobody knows what it keeps."""
        others = self._flights.keys() - {number}
        if not others <= self._measured.keys():
            return None
        kept = sum(self._measured[other].kept_bytes for other in others)
        return self.stage.resident_bytes + sum(map(self.task_bytes, self._tasks)) + kept

    def _sample(self, item: Train, labels: Tensor | None) -> MemorySample:
        """With the shape of ``item``; nothing measured yet."""
        stage = self.stage
        supervised: list[int] = []
        if stage.last:
            assert labels is not None
            assert stage.head_weight is not None
            tokens = [segment.tokens for segment in item.segments]
            supervised = supervised_together(labels, tokens, stage.head_weight)
        loras = [self._task(segment.task).lora for segment in item.segments]
        adapters = [kept_of(self._facts, lora) for lora in loras]
        closing = [segment for segment in item.segments if segment.closes_step]
        exact, layer = exact_parts(
            [(ranks, segment.tokens) for ranks, segment in zip(adapters, item.segments, strict=True)],
            item.tokens,
            self._input_groups,
            input_bytes=stage.dtype.itemsize,
            # These are in the type that products are taken in.
            low_bytes=product_dtype(stage.dtype, stage.device).itemsize,
            recompute=self._recompute,
            copies=any(lora.use_dora for lora in loras),
        )
        return MemorySample(
            stage=stage.index,
            tokens=item.tokens,
            squared_tokens=sum(length**2 for segment in item.segments for length in segment.lengths),
            supervised=sum(supervised),
            loss_rows=loss_rows(supervised, self._facts.vocab_size, stage.device.type),
            exact_bytes=exact,
            layer_bytes=layer,
            floor_bytes=floor_bytes(
                max(self._task(segment.task).adapter.parameters.numel() for segment in closing),
                item.tokens * self._facts.hidden_size * stage.dtype.itemsize,
                stage.device.type,
            )
            if closing
            else 0,
            lowest_group=lowest_adapted(adapters, self._input_groups) if stage.first else 0,
            calibration=self.calibrates,
            item=max(0, item.number),
        )


def _used(ledger: Ledger, beside: int | None, own: int) -> int | None:
    """Of the whole stage at the most: as the allocator has it, else what is beside the microbatch and its ``own``."""
    if ledger.in_use is not None:
        return ledger.in_use
    return beside + own if beside is not None else None
