"""Base models on a hub and on web servers: what is read, what is kept, and what a bad server can do to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from mlora_worker.protocol import HUB_ENDPOINT, ModelSource, StorageAccess
from mlora_worker.storage.base_model.cached_weights import CachedWeights
from mlora_worker.storage.base_model.model_folder import HubFolder, WebFolder
from mlora_worker.storage.base_model.model_source import ModelFiles, RemoteAccess, open_model, pinned
from mlora_worker.storage.base_model.safetensors_reader import BrokenModel
from mlora_worker.storage.base_model.weight_cache import WeightCache
from mlora_worker.storage.egress_policy import Destinations
from mlora_worker.storage.errors import AccessRefused, StorageError, StoreBusy, StoreUnreachable
from mlora_worker.storage.object_store.s3 import S3Timeouts
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.http import WebFiles
from mlora_worker.storage.remote.hub import HubClient, HubFile, RepositoryPath, model_address
from tests.fixtures.hub_server import WebServer, put_model, serving

LOCAL = ("127.0.0.0/8",)
HURRY = S3Timeouts(connect_seconds=2, read_seconds=2, attempts=3)
STORE = open_store(StorageAccess(), allow_files=False)
FIRST = {"embed.weight": torch.arange(20_000.0), "layers.0.weight": torch.arange(300.0)}
SECOND = {"layers.1.weight": torch.arange(40_000.0), "head.weight": torch.arange(7.0)}


def shards() -> dict[str, bytes]:
    weight_map = dict.fromkeys(FIRST, "model-1.safetensors") | dict.fromkeys(SECOND, "model-2.safetensors")
    return {
        "config.json": b"{}",
        "tokenizer.json": b'{"a": 1}',
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "model-1.safetensors": save(FIRST),
        "model-2.safetensors": save(SECOND),
    }


@pytest.fixture
def hub() -> Iterator[WebServer]:
    with serving() as made:
        yield made


@pytest.fixture
def blobs() -> Iterator[WebServer]:
    with serving() as made:
        yield made


def access(hub: WebServer, token: str | None = None, cache: int = 2**30) -> RemoteAccess:
    return RemoteAccess(
        hub_endpoint=hub.url + "/",
        hub_token=lambda: token,
        allowed_networks=LOCAL,
        cache_bytes=cache,
        timeouts=HURRY,
    )


def source(uri: str = "hf://acme/tiny", **more: str) -> ModelSource:
    return ModelSource(name="acme/tiny", uri=uri, **more)


def opened(hub: WebServer, folder: Path, cache: int = 2**30) -> ModelFiles:
    return open_model(STORE, source(), folder, access(hub, cache=cache))


def on_web(server: WebServer, files: dict[str, bytes]) -> ModelSource:
    server.files |= {f"/models/tiny/{name}": content for name, content in files.items()}
    return source(f"{server.url}/models/tiny/")


@pytest.mark.parametrize("cache", [0, 2**30])
def test_a_models_tensors_and_small_files_come_from_its_hub(
    hub: WebServer, blobs: WebServer, tmp_path: Path, cache: int
) -> None:
    put_model(hub, blobs, "acme/tiny", "c0ffee", shards())
    files = opened(hub, tmp_path, cache)
    assert files.names() == {*FIRST, *SECOND}
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in {**FIRST, **SECOND}.items())
    files.prove()
    assert {path.name for path in files.folder().iterdir()} == {
        "config.json",
        "tokenizer.json",
    }
    assert files.source.commit == "c0ffee"


def test_the_token_is_told_to_the_hub_alone(hub: WebServer, blobs: WebServer, tmp_path: Path) -> None:
    put_model(hub, blobs, "acme/tiny", "c0ffee", shards())
    hub.private = True
    files = open_model(STORE, source(), tmp_path, access(hub, "hub-token"))
    assert torch.equal(files.tensor("head.weight"), SECOND["head.weight"])
    assert {one.token for one in hub.seen} == {"Bearer hub-token"}
    assert blobs.seen
    assert {one.token for one in blobs.seen} == {None}


def test_a_branch_that_moves_while_the_ranks_start_changes_none_of_them(
    hub: WebServer, blobs: WebServer, tmp_path: Path
) -> None:
    put_model(hub, blobs, "acme/tiny", "old", shards(), revision="v1")
    first = pinned(source(revision="v1"), access(hub))
    put_model(hub, blobs, "acme/tiny", "new", {**shards(), "config.json": b'{"new": 1}'}, revision="v1")
    files = open_model(STORE, first, tmp_path, access(hub))
    assert (files.folder() / "config.json").read_bytes() == b"{}"
    again = open_model(STORE, source(revision="v1"), tmp_path, access(hub))
    assert (again.folder() / "config.json").read_bytes() == b'{"new": 1}'
    assert (files.folder() / "config.json").read_bytes() == b"{}"  # side by side


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        (HUB_ENDPOINT, ""),
        (HUB_ENDPOINT + "/", ""),
        ("https://HuggingFace.co:443", ""),
        ("https://hub.acme.example/", "https://hub.acme.example"),
    ],
)
def test_a_hub_other_than_the_public_one_is_told_apart(endpoint: str, told: str) -> None:
    class Empty(HubClient):
        def entries(self, at: RepositoryPath, commit: str) -> list[HubFile]:
            del at, commit
            return []

    web = WebFiles(Destinations(()), HURRY)
    at = model_address("hf://acme/tiny", None)
    folder = HubFolder(Empty(web, None, endpoint), web, at, "c0ffee", "hf://acme/tiny")
    assert folder.origin("hf://acme/tiny") == told


def test_only_the_blocks_of_the_tensors_that_are_asked_for_are_fetched(
    hub: WebServer, blobs: WebServer, tmp_path: Path
) -> None:
    tensors = {
        f"layers.{layer:02}.weight": torch.full((25_000,), float(layer)) for layer in range(20)
    }  # 2 MB
    put_model(hub, blobs, "acme/tiny", "c", {"config.json": b"{}", "model.safetensors": save(tensors)})
    files = small_blocks(open_model(STORE, source(), tmp_path, access(hub)), tmp_path)
    for layer in range(10, 13):
        files.tensor(f"layers.{layer:02}.weight")
    files.prove()  # too little is here for the file's sum
    assert 300_000 <= blobs.part_bytes < 300_000 + 2 * 16_384 + 10_000


def small_blocks(files: ModelFiles, folder: Path, block: int = 16_384) -> ModelFiles:
    """The same with smaller blocks than a real cache has."""
    weights = files._weights
    assert weights is not None
    files._weights = CachedWeights(weights._folder, WeightCache(folder / "weights", 2**30, block=block))
    return files


def test_what_was_fetched_before_a_kill_is_not_fetched_again(
    hub: WebServer, blobs: WebServer, tmp_path: Path
) -> None:
    put_model(hub, blobs, "acme/tiny", "c0ffee", shards())
    small_blocks(opened(hub, tmp_path), tmp_path).tensor("embed.weight")
    before = blobs.part_bytes
    files = small_blocks(opened(hub, tmp_path), tmp_path)
    assert torch.equal(files.tensor("embed.weight"), FIRST["embed.weight"])
    assert blobs.part_bytes - before < 1500  # headers alone


def test_a_block_that_was_damaged_on_the_volume_is_fetched_again(
    hub: WebServer, blobs: WebServer, tmp_path: Path
) -> None:
    put_model(hub, blobs, "acme/tiny", "c0ffee", shards())
    small_blocks(opened(hub, tmp_path), tmp_path).tensor("embed.weight")
    for path in (tmp_path / "weights").glob("*.data"):
        with path.open("r+b") as file:
            file.seek(20_000)
            file.write(b"damage!!")
    before = blobs.part_bytes
    files = small_blocks(opened(hub, tmp_path), tmp_path)
    assert torch.equal(files.tensor("embed.weight"), FIRST["embed.weight"])
    assert 16_384 <= blobs.part_bytes - before < 16_384 + 1500


def test_bytes_that_are_not_the_hubs_are_found_by_their_sum_and_not_kept(
    hub: WebServer, blobs: WebServer, tmp_path: Path
) -> None:
    put_model(hub, blobs, "acme/tiny", "c0ffee", shards())
    (path,) = (path for path, content in blobs.files.items() if content == save(SECOND))
    blobs.files[path] = save({**SECOND, "head.weight": torch.ones(7)})  # as long as the right one
    files = opened(hub, tmp_path)
    files.tensor("head.weight")
    # No BrokenModel, with which a rank says that another start would change nothing.
    with pytest.raises(StoreUnreachable, match=r"model-2.safetensors does not match the SHA-256"):
        files.prove()
    blobs.files[path] = save(SECOND)
    files = opened(hub, tmp_path)
    assert torch.equal(files.tensor("head.weight"), SECOND["head.weight"])
    files.prove()


def test_a_small_file_that_is_not_the_hubs_is_not_used(
    hub: WebServer, blobs: WebServer, tmp_path: Path
) -> None:
    put_model(hub, blobs, "acme/tiny", "c0ffee", shards())
    hub.files["/acme/tiny/resolve/c0ffee/tokenizer.json"] = b'{"a": 2}'
    with pytest.raises(StoreUnreachable, match=r"tokenizer.json does not match the hub's file"):
        opened(hub, tmp_path).folder()


def test_connections_that_break_are_taken_up_where_they_broke(
    hub: WebServer, blobs: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlora_worker.storage.remote.http._PAUSES", (0.0,))
    put_model(hub, blobs, "acme/tiny", "c0ffee", shards())
    files = opened(hub, tmp_path)
    files.names()
    blobs.seen.clear()
    blobs.cut = [50_000, 20_000]
    assert torch.equal(files.tensor("embed.weight"), FIRST["embed.weight"])
    assert blobs.part_bytes == len(save(FIRST))
    blobs.cut = [10, 10, 10]
    with pytest.raises(StoreUnreachable, match=r"was lost while reading, after 30 of"):
        files.tensor("layers.1.weight")
    assert torch.equal(files.tensor("layers.1.weight"), SECOND["layers.1.weight"])


@pytest.mark.parametrize(
    ("headers", "waited"),
    [
        ({"Retry-After": "7"}, 7.0),
        (
            {"Retry-After": "Sat, 28 Nov 2026 10:00:09 GMT", "Date": "Sat, 28 Nov 2026 10:00:00 GMT"},
            9.0,
        ),
        ({"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"api";q=500;w=300'}, 55.0),
        ({"Retry-After": "soon"}, 0.5),
        ({}, 0.5),
    ],
)
def test_a_busy_server_is_left_alone_as_long_as_it_asks(
    hub: WebServer, headers: dict[str, str], waited: float
) -> None:
    hub.files["/file"] = b"0123456789"
    hub.trouble = [(429, headers)]
    pauses: list[float] = []
    web = WebFiles(Destinations(LOCAL), HURRY, pause=pauses.append)
    found = web.probe(f"{hub.url}/file")
    assert b"".join(web.range_pieces(f"{hub.url}/file", 2, 3, expected=found)) == b"234"
    assert pauses == [pytest.approx(waited)]


NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)


def patient(pauses: list[float]) -> WebFiles:
    return WebFiles(Destinations(LOCAL), HURRY, pause=pauses.append, now=lambda: NOON)


@pytest.mark.parametrize(
    "headers", [{"Retry-After": "200"}, {"RateLimit": '"api";r=0;t=200'}, {"RateLimit-Reset": "200"}]
)
def test_a_server_that_asks_for_long_is_left_alone_by_whoever_has_read_little(
    hub: WebServer, headers: dict[str, str]
) -> None:
    hub.files["/file"] = b"0123456789"
    hub.trouble = [(429, headers)]
    pauses: list[float] = []
    with pytest.raises(
        StoreBusy, match=r"answered 429: it requests a pause of 200 s, .* at 2026-11-28 12:03:20 UTC"
    ):
        patient(pauses).read_range(f"{hub.url}/file", 2, 3)
    assert (pauses, len(hub.seen)) == ([], 1)


def test_who_has_read_much_waits_on_the_spot_and_not_for_ever(hub: WebServer) -> None:
    hub.files["/file"] = b"0123456789"
    pauses: list[float] = []
    web = patient(pauses)
    for _ in range(20):
        found = web.probe(f"{hub.url}/file")
    for _ in range(12):
        hub.trouble = [(429, {"Retry-After": "300"})]
        assert b"".join(web.range_pieces(f"{hub.url}/file", 2, 3, expected=found)) == b"234"
    assert pauses == [300.0] * 12
    hub.trouble = [(429, {"Retry-After": "300"})]
    with pytest.raises(StoreBusy):
        web.read_range(f"{hub.url}/file", 2, 3)


@pytest.mark.parametrize(("status", "kind"), [(429, StoreBusy), (503, StoreUnreachable)])
def test_who_is_busy_without_a_time_is_tried_and_named(
    hub: WebServer, status: int, kind: type[StorageError]
) -> None:
    hub.files["/file"] = b"0123456789"
    hub.trouble = [(status, {})] * 9
    with pytest.raises(StorageError, match=f"answered {status}") as caught:
        patient([]).read_range(f"{hub.url}/file", 2, 3)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [
        (
            401,
            AccessRefused,
            r"denies access to the model acme/tiny, revision main: .*HF_TOKEN into the Secret",
        ),
        (404, BrokenModel, r"has no model acme/tiny, revision main, or it needs a token"),
    ],
)
def test_a_model_that_the_hub_does_not_give_says_why(
    hub: WebServer, tmp_path: Path, status: int, kind: type[StorageError], told: str
) -> None:
    hub.private = status == 401
    with pytest.raises(kind, match=told):
        opened(hub, tmp_path)


def test_a_model_of_pickles_is_refused_on_hubs_and_on_the_web(
    hub: WebServer, blobs: WebServer, tmp_path: Path
) -> None:
    pickles = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    put_model(hub, blobs, "acme/tiny", "c0ffee", pickles)
    for files in (
        opened(hub, tmp_path),
        open_model(STORE, on_web(blobs, pickles), tmp_path, access(hub)),
    ):
        with pytest.raises(BrokenModel, match=r"pickle files \(pytorch_model.bin\).*save_pretrained"):
            files.names()


@pytest.mark.parametrize(
    "uri", ["hf://tiny", "hf://acme/tiny@v1", "hf://datasets/acme/tiny", "hf://", "hf:///tiny"]
)
def test_what_is_no_model_of_a_hub_is_told_with_what_to_write(uri: str) -> None:
    with pytest.raises(StorageError, match=r"write hf://OWNER/NAME, and put a revision into model.revision"):
        model_address(uri, None)


def test_a_folder_of_a_repository_is_a_model_too(hub: WebServer, blobs: WebServer, tmp_path: Path) -> None:
    put_model(hub, blobs, "acme/tiny", "c", {f"small/{name}": data for name, data in shards().items()})
    files = open_model(STORE, source("hf://acme/tiny/small"), tmp_path, access(hub))
    assert torch.equal(files.tensor("head.weight"), SECOND["head.weight"])
    assert (files.folder() / "config.json").is_file()


@pytest.mark.parametrize("gives_parts", [True, False])
def test_a_model_on_a_web_server_is_read_in_parts_where_it_gives_them(
    hub: WebServer, tmp_path: Path, gives_parts: bool
) -> None:
    hub.gives_parts = gives_parts
    files = open_model(STORE, on_web(hub, shards()), tmp_path, access(hub))
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in {**FIRST, **SECOND}.items())
    assert {path.name for path in files.folder().iterdir()} == {"config.json", "tokenizer.json"}


def test_a_damaged_block_of_a_server_that_gives_no_parts_is_repaired(hub: WebServer, tmp_path: Path) -> None:
    hub.gives_parts = False
    source = on_web(hub, shards())
    open_model(STORE, source, tmp_path, access(hub)).tensor("embed.weight")
    for path in (tmp_path / "weights").glob("*.data"):
        with path.open("r+b") as file:
            file.seek(20_000)
            file.write(b"damage!!")
    again = open_model(STORE, source, tmp_path, access(hub))
    assert torch.equal(again.tensor("embed.weight"), FIRST["embed.weight"])


def test_a_web_server_that_gives_no_parts_needs_room_to_keep_whole_files(
    hub: WebServer, tmp_path: Path
) -> None:
    hub.gives_parts = False
    files = open_model(STORE, on_web(hub, shards()), tmp_path, access(hub, cache=0))
    with pytest.raises(
        BrokenModel, match=r"does not support range requests, and the worker's cache is too small.*modelCache"
    ):
        files.names()


def test_a_file_that_changes_while_it_is_read_is_never_mixed(hub: WebServer, tmp_path: Path) -> None:
    files = open_model(STORE, on_web(hub, shards()), tmp_path, access(hub))
    files = small_blocks(files, tmp_path)
    files.tensor("embed.weight")
    hub.tags["/models/tiny/model-2.safetensors"] = "another"
    with pytest.raises(StoreUnreachable, match="changed while it was being read"):
        files.tensor("layers.1.weight")


def test_a_server_without_tags_is_read_and_nothing_of_it_is_kept(hub: WebServer, tmp_path: Path) -> None:
    hub.tagless = True
    files = open_model(STORE, on_web(hub, shards()), tmp_path, access(hub))
    assert torch.equal(files.tensor("embed.weight"), FIRST["embed.weight"])
    assert not list(tmp_path.glob("weights/*"))
    hub.files["/models/tiny/model-2.safetensors"] += b"more"
    with pytest.raises(StoreUnreachable, match="changed while it was being read"):
        files.tensor("layers.1.weight")


def test_an_index_that_leads_out_of_its_folder_is_refused(hub: WebServer, tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "../secret.safetensors"}}).encode()
    files = {"config.json": b"{}", "model.safetensors.index.json": index}
    with pytest.raises(BrokenModel, match="outside of its folder"):
        open_model(STORE, on_web(hub, files), tmp_path, access(hub))


def test_addresses_that_only_a_worker_can_reach_are_refused(hub: WebServer, tmp_path: Path) -> None:
    put_model(hub, hub, "acme/tiny", "c0ffee", shards())
    for one in (source(), on_web(hub, shards())):
        with pytest.raises(StorageError, match=r"is refused: 127.0.0.1"):
            open_model(STORE, one, tmp_path, RemoteAccess(hub_endpoint=hub.url, timeouts=HURRY))


def test_a_folder_on_the_web_without_a_model_is_told(hub: WebServer) -> None:
    web = WebFiles(Destinations(LOCAL), HURRY)
    assert WebFolder(web, f"{hub.url}/nothing").list("", 10) == []
