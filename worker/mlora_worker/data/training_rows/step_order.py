"""Which rows belong to which optimizer step. Pure.

Each epoch has its own permutation, which depends on the task's seed and the epoch's number and on nothing
else: not on neighbours, not on how often the task was interrupted. A step takes the next ``batchSize *
gradientAccumulationSteps`` rows of it; an epoch's last step takes what is left.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlora_worker.protocol import Training


class StepPlan:
    """Holds one epoch's permutation at a time: O(row_count) memory, whatever the number of epochs."""

    def __init__(self, row_count: int, training: Training) -> None:
        if row_count < 1:
            raise ValueError("a plan needs at least one row")
        self._row_count = row_count
        self._seed = training.seed
        self.window = training.batch_size * training.gradient_accumulation_steps  # rows of a step
        self._steps_per_epoch = -(-row_count // self.window)
        self._total_steps = training.max_steps or training.epochs * self._steps_per_epoch
        self._epoch = -1
        self._permutation: npt.NDArray[np.intp] = np.empty(0, np.intp)

    @property
    def steps_per_epoch(self) -> int:
        return self._steps_per_epoch

    @property
    def total_steps(self) -> int:
        return self._total_steps

    def rows_of_step(self, step: int) -> tuple[int, ...]:
        """Row numbers (0-based, in training order) of a step (1-based). Raises ValueError outside
        1..total_steps.
        """
        if not 1 <= step <= self._total_steps:
            raise ValueError(f"step {step} is not in 1..{self._total_steps}")
        epoch, place = divmod(step - 1, self._steps_per_epoch)
        if epoch != self._epoch:
            self._permutation, self._epoch = permutation(self._row_count, self._seed, epoch), epoch
        return tuple(self._permutation[place * self.window : (place + 1) * self.window].tolist())

    @property
    def first_epoch(self) -> npt.NDArray[np.intp]:
        """All rows in the order in which the first epoch takes them."""
        return permutation(self._row_count, self._seed, 0)


def permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.intp]:
    """Order of ``count`` rows in an epoch (0-based).

    Sorts the raw stream of Philox, which numpy promises never to change; ``Generator.permutation`` has no
    such promise (NEP 19), and a task must be able to go on under a newer numpy.
    """
    stream = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)
    return np.argsort(stream, kind="stable")
