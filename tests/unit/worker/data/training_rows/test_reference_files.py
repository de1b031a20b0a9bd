"""What the base thinks of pairs is found again, and only by whoever has the same rows and the same base."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mlora_worker.data.training_rows.reference_files import ReferenceFiles

VALUES = np.array([[-1.5, -2.25], [np.nan, np.nan], [-3.0, -4.0]])


def test_what_was_written_is_read_to_the_bit(tmp_path: Path) -> None:
    ReferenceFiles(tmp_path / "made", "base").write("n", "rows", None, VALUES)
    found = ReferenceFiles(tmp_path / "made", "base").read("n", "rows", None, 3, 2)
    assert found is not None
    np.testing.assert_array_equal(found, VALUES)
    assert found.flags.writeable
    (path,) = (tmp_path / "made").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("base", "namespace", "rows", "adapter"),
    [
        ("other", "n", "rows", None),
        ("base", "m", "rows", None),
        ("base", "n", "others", None),
        ("base", "n", "rows", "adapter"),
    ],
)
def test_nothing_is_found_of_anything_else(
    tmp_path: Path, base: str, namespace: str, rows: str, adapter: str | None
) -> None:
    ReferenceFiles(tmp_path, "base").write("n", "rows", None, VALUES)
    assert ReferenceFiles(tmp_path, base).read(namespace, rows, adapter, 3, 2) is None


def test_answers_without_a_pair_have_one_value_each(tmp_path: Path) -> None:
    files = ReferenceFiles(tmp_path, "base")
    files.write("n", "rows", None, VALUES[:, :1])
    found = files.read("n", "rows", None, 3, 1)
    assert found is not None
    np.testing.assert_array_equal(found, VALUES[:, :1])
    assert files.read("n", "rows", None, 3, 2) is None


def test_a_base_without_a_commit_leaves_nothing(tmp_path: Path) -> None:
    files = ReferenceFiles(tmp_path, None)
    files.write("n", "rows", None, VALUES)
    assert files.read("n", "rows", None, 3, 2) is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_whole_is_ignored(tmp_path: Path) -> None:
    files = ReferenceFiles(tmp_path, "base")
    files.write("n", "rows", None, VALUES)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert files.read("n", "rows", None, 3, 2) is None


def test_a_disk_without_room_costs_a_forward_and_no_task(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ReferenceFiles(tmp_path / "file" / "below", "base").write("n", "rows", None, VALUES)


def test_values_of_more_bytes_than_all_may_have_are_not_kept_and_remove_nothing(tmp_path: Path) -> None:
    files = ReferenceFiles(tmp_path, "base", most_bytes=VALUES.nbytes)
    files.write("n", "few", None, VALUES)
    files.write("n", "many", None, np.concatenate([VALUES, VALUES]))
    assert files.read("n", "many", None, 2 * len(VALUES), 2) is None
    assert files.read("n", "few", None, len(VALUES), 2) is not None


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    files = ReferenceFiles(tmp_path, "base", most_bytes=2 * VALUES.nbytes)
    for rows in ("a", "b"):
        files.write("n", rows, None, VALUES)
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        os.utime(path, (number, number))
    files.read("n", "a", None, 3, 2)
    files.write("n", "c", None, VALUES)
    assert files.read("n", "b", None, 3, 2) is None
    assert files.read("n", "a", None, 3, 2) is not None
    assert files.read("n", "c", None, 3, 2) is not None
