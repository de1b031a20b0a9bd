"""Which of the usable rows are trained on, and which are kept to evaluate on. Pure, and the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlora_worker.data.training_rows.step_order import permutation
from mlora_worker.protocol import Dataset

# Streams of the same seed that no epoch has.
_SAMPLE, _HELD_OUT = 2**63, 2**63 + 1


@dataclass(frozen=True, slots=True)
class Selection:
    """Row numbers in the file's order; ``beyond`` is how many usable rows ``limit`` leaves out."""

    train: npt.NDArray[np.intp]
    held_out: npt.NDArray[np.intp]
    beyond: int


def select(count: int, dataset: Dataset, seed: int) -> Selection:
    """Of ``count`` usable rows. First ``limit`` is applied, then ``heldOut`` of the rest is drawn, at least one row; both
    with ``dataset.shuffleSeed``, or with ``seed`` where only what is held out has to be drawn.
    """
    drawn = dataset.shuffle_seed
    kept = np.arange(count)
    if dataset.limit is not None and dataset.limit < count:
        kept = kept if drawn is None else permutation(count, drawn, _SAMPLE)
        kept = np.sort(kept[: dataset.limit])
    if dataset.held_out is None:
        return Selection(kept, kept[:0], count - len(kept))
    order = permutation(len(kept), seed if drawn is None else drawn, _HELD_OUT)
    apart = max(1, round(len(kept) * dataset.held_out))
    return Selection(np.sort(kept[order[apart:]]), np.sort(kept[order[:apart]]), count - len(kept))
