"""Is there room? Needs on one volume add up; what cannot be asked is passed over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.disk_space import SpaceNeed, Volume, check_space, volume_of

MIB = 2**20
VOLUMES = {"/out": Volume(1, 10 * MIB), "/cache": Volume(1, 10 * MIB), "/tmp": Volume(2, 3 * MIB)}


def volume(folder: Path) -> Volume:
    if str(folder) not in VOLUMES:
        raise FileNotFoundError(folder)
    return VOLUMES[str(folder)]


@pytest.mark.parametrize(
    ("needs", "told"),
    [
        ([], None),
        ([("/out", 10 * MIB)], None),
        ([("/out", 10 * MIB + 1)], "volume of /out has 10.0 MiB free, and the task needs 10.0 MiB"),
        ([("/out", 6 * MIB), ("/cache", 5 * MIB)], "needs 11.0 MiB there (6.0 MiB for x, 5.0 MiB for x)"),
        ([("/out", 6 * MIB), ("/tmp", 3 * MIB)], None),
        ([("/out", 6 * MIB), ("/tmp", 4 * MIB)], "volume of /tmp has 3.0 MiB free, and the task needs 4.0 MiB"),
        ([("/nowhere", 2**60)], None),
    ],
)  # fmt: skip
def test_a_volume_that_the_task_would_fill_is_named_with_the_figures(
    needs: list[tuple[str, int]], told: str | None
) -> None:
    asked = [SpaceNeed(Path(folder), size, "x") for folder, size in needs]
    if told is None:
        check_space(asked, volume)
        return
    with pytest.raises(StorageError) as caught:
        check_space(asked, volume)
    assert caught.value.reason is FailureReason.INSUFFICIENT_SPACE
    assert told in str(caught.value)


def test_a_folder_that_is_not_there_yet_has_the_space_of_the_one_above_it(tmp_path: Path) -> None:
    here, below = volume_of(tmp_path), volume_of(tmp_path / "not" / "yet")
    assert here.device == below.device == tmp_path.stat().st_dev
    bytes_free = shutil.disk_usage(tmp_path).free  # for a user who is not root
    assert below.free == pytest.approx(bytes_free, rel=0.1), "others write meanwhile"
