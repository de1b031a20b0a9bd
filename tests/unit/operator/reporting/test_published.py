"""Losses are read beside an adapter, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlora_operator.download import Access, AdapterCorrupt, AdapterNotFound, open_source, read_manifest
from mlora_operator.reporting.curves import Finished, Run
from mlora_operator.reporting.published import finished_run


def read(folder: Path) -> Finished:
    source = open_source(folder.as_uri(), Access())
    return finished_run(source, read_manifest(source))


def test_points_and_settings_are_those_of_the_adapter(adapter: Path, finished: Finished, run: Run) -> None:
    found = read(adapter)
    assert (found.run, found.points) == (run, finished.points)
    assert found.settings == {
        "base_model": "acme/tiny", "steps": 3, "r": 8, "lora_alpha": 16, "target_modules": "q_proj, v_proj",
    }  # fmt: skip


@pytest.mark.parametrize("change", [b'{"step": 4, "loss": 1.0}\n', b"x"])
def test_other_losses_than_the_manifests_are_refused(adapter: Path, change: bytes) -> None:
    with (adapter / "history.jsonl").open("ab") as file:
        file.write(change)
    with pytest.raises(AdapterCorrupt, match=r"history.jsonl does not match the SHA-256"):
        read(adapter)


def test_an_adapter_without_losses_is_told(adapter: Path) -> None:
    manifest = adapter / "manifest.json"
    manifest.write_text(manifest.read_text().replace("history.jsonl", "other.jsonl"))
    with pytest.raises(AdapterNotFound, match=r"team-a/support-bot has no history.jsonl"):
        read(adapter)
