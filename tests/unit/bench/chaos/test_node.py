"""What a benchmark on a real node is told: which process is a pod's, and what a watch says of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.chaos_parts.containers import first_process
from bench.chaos_parts.watched import Mirror
from bench.chaos_parts.world import Tasks

UID = "76a6d31c-d8cf-4399-8a43-a23c631bac0c"
CGROUPFS = f"4:memory:/mlora-test/kubepods/burstable/pod{UID}/0123abcd\n"
SYSTEMD = f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-0123.scope\n"


def process(proc: Path, pid: int, groups: str, spaces: str, *words: str) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cgroup").write_text(groups)
    (folder / "status").write_text(f"Name:\tpython3\nNSpid:\t{spaces}\nThreads:\t1\n")
    (folder / "cmdline").write_bytes(b"\0".join(word.encode() for word in words) + b"\0")


@pytest.mark.parametrize("groups", [CGROUPFS, SYSTEMD], ids=["cgroupfs", "systemd"])
def test_the_first_process_of_a_pods_container_is_found(tmp_path: Path, groups: str) -> None:
    (tmp_path / "self").mkdir()
    process(tmp_path, 10, groups, "10\t20\t1", "/pause")
    process(tmp_path, 11, groups, "11\t21\t1", "python3", "-m", "mlora_worker")
    process(tmp_path, 12, groups, "12\t22\t9", "python3", "-m", "mlora_worker")
    process(tmp_path, 13, groups.replace("76a6", "0000"), "13\t23\t1", "python3", "-m", "mlora_worker")
    process(tmp_path, 14, groups, "14", "containerd-shim", "-id", "mlora_worker.log")
    assert first_process(UID, "mlora_worker", tmp_path) == 11
    assert first_process(UID, "mlora_operator", tmp_path) is None


def test_a_process_that_ends_under_the_look_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "10").mkdir()
    process(tmp_path, 11, CGROUPFS, "11\t1", "python3", "-m", "mlora_worker")
    assert first_process(UID, "mlora_worker", tmp_path) == 11


def raw(uid: str, end: str | None = None, reason: str = "") -> dict[str, Any]:
    held = [{"type": end, "status": "True", "reason": reason, "message": "words"}] if end else []
    return {"metadata": {"name": "one", "uid": uid}, "status": {"conditions": held}}


def test_a_task_is_as_the_watch_last_told_it() -> None:
    mirror = Mirror()
    mirror.see("ADDED", raw("a", "Succeeded"))
    mirror.add(raw("a"))
    assert mirror.all() == [raw("a", "Succeeded")], "what was just made is older than what the watch has told"
    mirror.see("DELETED", raw("a"))
    assert (mirror.all(), mirror.broken) == ([], [])


def test_a_task_that_was_deleted_does_not_come_back_by_a_late_word_but_by_a_new_one_of_its_name() -> None:
    mirror = Mirror()
    mirror.add(raw("a"))
    mirror.forget("one")
    mirror.see("MODIFIED", raw("a"))
    assert mirror.all() == []
    mirror.see("ADDED", raw("b"))
    assert mirror.all() == [raw("b")]


@pytest.mark.parametrize(("after", "broken"), [("Succeeded", 0), ("Failed", 1), (None, 1)])
def test_a_task_that_goes_back_from_its_end_is_told(after: str | None, broken: int) -> None:
    mirror = Mirror()
    mirror.see("MODIFIED", raw("a", "Succeeded"))
    mirror.see("MODIFIED", raw("a", after))
    assert len(mirror.broken) == broken


def test_tasks_that_have_ended_are_noted_and_deleted() -> None:
    tasks, deleted = Tasks(), list[str]()
    assert list(tasks.unfinished([raw("a")], deleted.append)) == ["one"]
    assert tasks.unfinished([raw("a", "Failed", "AccessDenied")], deleted.append) == {}
    assert (tasks.ends, tasks.why, deleted) == (
        {"one": "Failed"},
        {"one": "AccessDenied: words"},
        ["one"],
    )
