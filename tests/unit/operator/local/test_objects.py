"""Files for the API server: what it does to objects, done to files."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.local.objects import LocalObjects, merged
from mlora_operator.reconcile.ports import Gone
from mlora_operator.reconcile.state.snapshot import Key

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def task(rank: int = 8) -> dict[str, Any]:
    return {
        "apiVersion": "mlora.dev/v1alpha1",
        "kind": "LoRATask",
        "metadata": {"namespace": "n", "name": "a"},
        "spec": {"lora": {"rank": rank}},
    }


def the(objects: LocalObjects) -> dict[str, Any]:
    (one,) = objects.of_kind("LoRATask")
    return one


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path, lambda: NOW)


def test_an_applied_object_has_what_the_api_server_gives(objects: LocalObjects, tmp_path: Path) -> None:
    objects.apply(task())
    meta = the(objects)["metadata"]
    assert meta["creationTimestamp"] == "2026-01-01T00:00:00Z"
    assert meta["generation"] == 1
    assert meta["uid"]
    assert yaml.safe_load((tmp_path / "loratasks" / "n.a.yaml").read_text()) == the(objects)


def test_applying_the_same_changes_nothing(objects: LocalObjects) -> None:
    objects.apply(task())
    before = the(objects)
    objects.apply(task())
    assert the(objects) == before


def test_a_new_spec_is_a_new_generation_of_the_same_object(objects: LocalObjects) -> None:
    objects.apply(task())
    before = the(objects)["metadata"]
    objects.patch_status("LoRATask", Key("n", "a"), before["uid"], {"step": 3})
    objects.apply(task(rank=16))
    after = the(objects)
    assert (after["metadata"]["uid"], after["metadata"]["generation"]) == (before["uid"], 2)
    assert after["status"] == {"step": 3}


def test_every_write_has_a_new_version(objects: LocalObjects) -> None:
    objects.apply(task())
    uid, first = the(objects)["metadata"]["uid"], the(objects)["metadata"]["resourceVersion"]
    objects.patch_status("LoRATask", Key("n", "a"), uid, {"step": 1})
    assert the(objects)["metadata"]["resourceVersion"] != first
    assert the(objects)["metadata"]["generation"] == 1


def test_a_status_of_another_object_of_the_same_name_is_not_written(objects: LocalObjects) -> None:
    objects.apply(task())
    for key, uid in ((Key("n", "a"), "other"), (Key("n", "b"), the(objects)["metadata"]["uid"])):
        with pytest.raises(Gone):
            objects.patch_status("LoRATask", key, uid, {})


@pytest.mark.parametrize(
    ("conditions", "rank", "resumed"),
    [
        ([{"type": "Succeeded", "status": "True"}], 8, True),
        ([{"type": "Succeeded", "status": "True"}], 16, False),
        ([{"type": "Succeeded", "status": "False"}, {"type": "Failed", "status": "True"}], 8, False),
        ([], 8, False),
    ],
)
def test_only_a_success_with_the_same_spec_is_taken_over(
    objects: LocalObjects, tmp_path: Path, conditions: list[dict[str, str]], rank: int, resumed: bool
) -> None:
    objects.apply(task())
    uid = the(objects)["metadata"]["uid"]
    objects.patch_status("LoRATask", Key("n", "a"), uid, {"conditions": conditions})

    later = LocalObjects(tmp_path, lambda: NOW)
    assert later.resume(task(rank)) is resumed
    if resumed:
        assert the(later)["metadata"]["uid"] == uid


@pytest.mark.parametrize("field", ["overwrite", "dtype"])
def test_a_success_is_taken_over_whatever_may_be_replaced_and_whatever_fields_are_new(
    tmp_path: Path, field: str
) -> None:
    """A former version has not written them."""
    spec = {
        "baseModel": "m",
        "dataset": {"uri": "s3://d/x"},
        "output": {"uri": "s3://a/x", "dtype": "float32"},
    }
    old, new = ({**task(), "spec": spec | {"output": dict(spec["output"])}} for _ in "ab")  # type: ignore[arg-type]
    del old["spec"]["output"]["dtype"]
    new["spec"]["output"][field] = True if field == "overwrite" else "float16"
    objects = LocalObjects(tmp_path, lambda: NOW)
    objects.apply(old)
    held = [{"type": "Succeeded", "status": "True"}]
    objects.patch_status("LoRATask", Key("n", "a"), the(objects)["metadata"]["uid"], {"conditions": held})
    assert LocalObjects(tmp_path, lambda: NOW).resume(new) is (field == "overwrite")


@pytest.mark.parametrize("content", [None, "", "]", "text"])
def test_a_file_that_says_nothing_is_no_former_run(
    objects: LocalObjects, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "loratasks").mkdir()
        (tmp_path / "loratasks" / "n.a.yaml").write_text(content)
    assert objects.resume(task()) is False


# The examples of RFC 7386, appendix A.
@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_merge_patch_does_what_its_standard_says(before: Any, patch: Any, after: Any) -> None:
    assert merged(before, patch) == after


@given(
    st.dictionaries(st.text(max_size=3), st.integers() | st.dictionaries(st.text(max_size=3), st.integers()))
)
def test_merging_what_is_there_changes_nothing(value: dict[str, Any]) -> None:
    assert merged(value, value) == value
