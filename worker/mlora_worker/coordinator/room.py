"""Will what a task writes fit on the disks that it goes to? A bucket cannot be asked; a volume can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mlora_worker.protocol import ModelFacts, TaskPlan
from mlora_worker.storage import uri as address
from mlora_worker.storage.checkpoint import KEPT, PREFIXES
from mlora_worker.storage.space import Need, Volume, check_space, volume_of

_ELEMENT = 4  # bytes: adapters are stored in float32


def weights_bytes(facts: ModelFacts, rank: int, targets: Sequence[str]) -> int:
    """Size of an adapter's weights without the file's header."""
    return sum(
        _ELEMENT * rank * (module.in_features + module.out_features) * module.count
        for module in facts.modules
        if module.name in targets
    )


def check_room(
    task: TaskPlan,
    facts: ModelFacts,
    targets: Sequence[str],
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
    adapter = weights_bytes(facts, task.lora.rank, targets)
    state = len(PREFIXES) * adapter
    needs = [Need(scratch(state), state, "what waits for its upload")]
    if address.scheme(task.output_uri) == address.FILE:
        needs.append(Need(address.file_path(task.output_uri), adapter, "the adapter"))
    if address.scheme(checkpoints) == address.FILE:
        needs.append(Need(address.file_path(checkpoints), (KEPT + 1) * state, f"{KEPT + 1} checkpoints"))
    check_space(reversed(needs), volume)  # an output is what its user knows
