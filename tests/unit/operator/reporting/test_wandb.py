"""What Weights & Biases keeps of a run offline, whatever is reported how often."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="needs mlora-operator[wandb]")

import wandb
from wandb.proto import wandb_internal_pb2

from mlora_operator.reporting.curves import Finished, Point, by_curve
from mlora_operator.reporting.wandb import LoggedRun


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # it reads the environment once


def records(file: Path) -> list[Any]:
    """The file is a log in LevelDB's format behind a header of seven bytes: blocks of 32 KiB, in which each chunk has a
    checksum (4 bytes), a length (2) and a kind (1: whole; 2, 3, 4: first, middle, last part)."""
    data, at, held, found = file.read_bytes(), 7, b"", []
    while at < len(data):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        held = (b"" if kind in (1, 2) else held) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(held))
    return found


def curves(file: Path) -> dict[str, dict[int, float]]:
    got: dict[str, dict[int, float]] = {}
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            fields = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in fields.items():
                if not name.startswith("_"):
                    assert fields["_step"] not in got.setdefault(name, {})
                    got[name][fields["_step"]] = value
    return got


def test_a_task_is_kept_once_for_wandb_sync(tmp_path: Path, finished: Finished) -> None:
    reporter = LoggedRun("acme/adapters", finished.run, str(tmp_path))
    reporter.add([Point("train/loss", 3, 2.5)])
    assert not list(tmp_path.iterdir())
    assert reporter.complete(finished) == len(finished.points)
    (file,) = (tmp_path / "wandb").rglob("*.wandb")
    assert file.parent.name.endswith(finished.run.uid)
    assert reporter.place() == f"wandb sync {file.parent}"
    assert curves(file) == by_curve(finished.points)
    (made,) = (one.run for one in records(file) if one.WhichOneof("record_type") == "run")
    assert (made.entity, made.project, made.display_name) == ("acme", "adapters", "team-a/support-bot")
    assert {item.key: item.value_json for item in made.config.update}["r"] == "8"

    assert LoggedRun("acme/adapters", finished.run, str(tmp_path)).complete(finished) == 0
    assert [*(tmp_path / "wandb").iterdir()] == [file.parent]
    shutil.rmtree(file.parent)
    assert LoggedRun("acme/adapters", finished.run, str(tmp_path)).complete(finished) == len(finished.points)
