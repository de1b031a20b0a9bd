"""Will what a task writes fit on the disks that it goes to? A bucket cannot be asked; a volume can."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mlora_worker.protocol import TaskPlan
from mlora_worker.storage import uri as address
from mlora_worker.storage.artifacts.checkpoint import KEPT
from mlora_worker.storage.artifacts.task_state import PREFIXES
from mlora_worker.storage.object_store.disk_space import SpaceNeed, Volume, check_space, volume_of
from mlora_worker.stream.targets import Target

_ELEMENT = 4  # bytes: adapters are stored in float32


def weights_bytes(targets: Iterable[Target]) -> int:
    """Size of an adapter's weights without the file's header."""
    return sum(_ELEMENT * target.parameters for target in targets)


def check_disk_space(
    task: TaskPlan,
    targets: Sequence[Target],
    *,
    checkpoints: str,
    scratch: Callable[[int], Path],
    volume: Callable[[Path], Volume] = volume_of,
) -> None:
    """Raises StorageError (InsufficientSpace) where a volume could not hold what ``task`` will write there.

    ``checkpoints``: address of its checkpoints' folder. ``scratch``: where a file of so many bytes waits for its upload.
    Up to ``KEPT`` checkpoints lie beside the one that is written. A task that has trained before is not asked: what it has
    done must not be given up for a disk that is full at this moment.
    """
    if task.started:
        return
    adapter = weights_bytes(targets)
    best = task.evaluation is not None and task.evaluation.keep_best
    state = (len(PREFIXES) + best) * adapter
    needs = [SpaceNeed(scratch(state), state, "files that wait for their upload")]
    if address.scheme(task.output_uri) == address.FILE:
        needs.append(SpaceNeed(address.file_path(task.output_uri), adapter, "the adapter"))
    if address.scheme(checkpoints) == address.FILE:
        needs.append(SpaceNeed(address.file_path(checkpoints), (KEPT + 1) * state, f"{KEPT + 1} checkpoints"))
    check_space(reversed(needs), volume)  # an output is what its user knows
