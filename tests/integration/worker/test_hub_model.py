"""Ranks that read their base model from a hub: one commit for all, and the same adapter as from a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlora_worker.protocol import ModelSource, TaskPhase, TaskPlan
from tests.fixtures.hub_server import put_model, serving
from tests.integration.worker.conftest import Group

pytestmark = pytest.mark.integration


def test_a_group_trains_on_a_private_model_of_a_hub_as_on_the_same_folder(
    start_group: Callable[..., Group],
    two_stages: Group,
    make_task: Callable[..., TaskPlan],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    expected = make_task("from-disk", outputUri=f"file://{tmp_path}/from-disk")
    assert two_stages.finish(expected)["from-disk"].phase is TaskPhase.SUCCEEDED
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "HF_TOKEN").write_text("hub-token\n")
    with serving() as hub, serving() as blobs:
        content = {path.name: path.read_bytes() for path in tiny_model.iterdir() if path.is_file()}
        put_model(hub, blobs, "org/tiny", "c0ffee", content, revision="v1")
        hub.private = True
        group = start_group(
            tiny_model,
            stages=2,
            model=ModelSource(name="org/tiny", uri="hf://org/tiny", revision="v1", dtype="float32"),
            hub_endpoint=hub.url,
            allowed_networks=("127.0.0.0/8",),
            storage_keys_dir=str(keys),
        )
        task = make_task("from-disk", outputUri=f"file://{tmp_path}/from-hub")
        report = group.finish(task)["from-disk"]
        assert report.phase is TaskPhase.SUCCEEDED, report.failure
        asked = [one.path for one in hub.seen if "/revision/" in one.path]
        assert asked == ["/api/models/org/tiny/revision/v1"]  # once, for both ranks
        assert {one.token for one in blobs.seen} == {None}
    first, second = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("from-disk", "from-hub")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
