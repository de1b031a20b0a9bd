"""Which silence says something of what else: a bucket with one set of keys, a mounted volume, a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlora_worker.coordinator.uploads.store_identity import input_stores, mount_of, output_store, store_of
from mlora_worker.protocol import Dataset, LoRAConfig, StorageAccess, TaskPlan, Training

MOUNTS = """\
22 1 0:21 / / rw - ext4 /dev/sda1 rw
30 22 0:30 / /mnt/team-a rw - nfs4 server:/a rw
31 22 0:31 / /mnt/team-a/in\\040use rw - nfs4 server:/b rw
"""


def access(**of: str) -> StorageAccess:
    return StorageAccess.model_validate(
        {"endpoint": "http://s3:8333", "accessKey": "a", "secretKey": "b"} | of
    )


def place(uri: str, **of: str) -> tuple[str, ...]:
    return store_of(uri, access(**of), lambda: MOUNTS)


SAME = [
    (("s3://bucket/x", {}), ("s3://bucket/y/z", {})),
    (("s3://bucket/x", {}), ("s3://bucket/x", {"endpoint": "http://S3:8333/"})),
    (("file:///mnt/team-a/x", {}), ("file:///mnt/team-a/y", {"accessKey": "c"})),
    (("file:///home/x", {}), ("file:///mnt/team-b", {})),
    (("https://host/a", {}), ("https://HOST:443/b?c", {})),
]
OTHER = [
    (("s3://bucket/x", {}), ("s3://another/x", {})),
    (("s3://bucket/x", {}), ("s3://bucket/x", {"endpoint": "http://s3:8334"})),
    (("s3://bucket/x", {}), ("s3://bucket/x", {"secretKey": "new"})),
    (("s3://bucket/x", {}), ("s3://bucket/x", {"caCertificate": "another"})),
    (("file:///mnt/team-a/x", {}), ("file:///mnt/team-a/in%20use/x", {})),
    (("file:///mnt/team-a/x", {}), ("file:///mnt/team-ab/x", {})),
    (("https://host/a", {}), ("https://host:8443/a", {})),
    (("gs://a", {}), ("s3://", {})),
]


@pytest.mark.parametrize(("one", "two"), SAME)
def test_same_places(one: tuple[str, dict[str, str]], two: tuple[str, dict[str, str]]) -> None:
    assert place(one[0], **one[1]) == place(two[0], **two[1])


@pytest.mark.parametrize(("one", "two"), OTHER)
def test_other_places(one: tuple[str, dict[str, str]], two: tuple[str, dict[str, str]]) -> None:
    assert place(one[0], **one[1]) != place(two[0], **two[1])


def test_no_key_can_be_read_from_a_place() -> None:
    assert "topsecret" not in repr(place("s3://bucket/x", secretKey="topsecret"))


def test_the_volume_of_a_path_is_the_longest_mount_above_it() -> None:
    assert mount_of(Path("/mnt/team-a/in use/x"), MOUNTS) == "/mnt/team-a/in use"
    assert mount_of(Path("/mnt"), MOUNTS) == "/"
    assert mount_of(Path("/x"), "") == "/"


def test_what_is_asked_before_a_task_trains_is_its_output_its_rows_and_what_it_starts_from() -> None:
    plan = TaskPlan.model_validate(
        {
            "uid": "u", "namespace": "n", "name": "a", "baseModel": "m", "lora": LoRAConfig(),
            "dataset": Dataset(uris=("s3://rows/a", "https://host/b")), "training": Training(),
            "outputUri": "s3://out/a", "storage": access(), "initFrom": {"uri": "s3://start/a"},
        }
    )  # fmt: skip
    kinds = {one[:3] for one in input_stores(plan)}
    assert kinds == {
        ("s3", "http://s3:8333", "rows"),
        ("s3", "http://s3:8333", "out"),
        ("s3", "http://s3:8333", "start"),
        ("web", "https://host"),
    }
    assert output_store(plan) in input_stores(plan)
