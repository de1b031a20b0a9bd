from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from mlora_worker.protocol import ModelSource, StorageAccess
from mlora_worker.storage.base_model.model_source import ModelFiles
from mlora_worker.storage.base_model.safetensors_reader import BrokenModel
from mlora_worker.storage.errors import StoreUnreachable, TooLarge
from mlora_worker.storage.object_store.store import open_store
from tests.fixtures.memory_store import MemoryStore

URI = "s3://models/tiny"
FIRST = {
    "embed.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "a.weight": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
    "scale": torch.tensor(0.5, dtype=torch.float16),
}
SECOND = {"b.weight": torch.arange(4, dtype=torch.int64), "none": torch.empty(0, 7)}
LOCAL = open_store(StorageAccess(), allow_files=True)


def model(memory: Any, cache: Path, files: dict[str, bytes], uri: str = URI) -> ModelFiles:
    memory.objects |= {f"{URI}/{name}": content for name, content in {"config.json": b"{}", **files}.items()}
    return ModelFiles(memory, ModelSource(name="acme/tiny", uri=uri), cache)


def sharded() -> dict[str, bytes]:
    weight_map = dict.fromkeys(FIRST, "model-1.safetensors") | dict.fromkeys(SECOND, "model-2.safetensors")
    index = json.dumps({"weight_map": weight_map}).encode()
    return {
        "model.safetensors.index.json": index,
        "model-1.safetensors": save(FIRST),
        "model-2.safetensors": save(SECOND),
    }


@pytest.mark.parametrize("uri", [URI, URI + "/"])
def test_tensors_of_all_shards_are_found_by_name_with_shape_and_type(
    memory: Any, tmp_path: Path, uri: str
) -> None:
    files = model(memory, tmp_path, sharded(), uri)
    assert files.names() == {*FIRST, *SECOND}
    for name, tensor in {**FIRST, **SECOND}.items():
        assert files.shape(name) == tuple(tensor.shape)
        assert files.dtype(name) == tensor.dtype
        assert torch.equal(files.tensor(name), tensor)


def test_only_headers_and_the_asked_tensor_are_read(memory: Any, tmp_path: Path) -> None:
    weights = save({"big": torch.zeros(1000, 100), "small": torch.ones(3)})
    files = model(memory, tmp_path, {"model.safetensors": weights})
    files.tensor("small")
    assert sum(length for _, _, length in memory.ranges) < 1000


def test_a_large_tensor_comes_in_pieces(memory: Any, tmp_path: Path) -> None:
    tensor = torch.arange(9 * 2**20, dtype=torch.float32)  # 36 MiB
    files = model(memory, tmp_path, {"model.safetensors": save({"big": tensor})})
    assert torch.equal(files.tensor("big"), tensor)
    assert max(length for _, _, length in memory.ranges) == 16 * 2**20


def test_a_local_model_is_used_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(FIRST, tmp_path / "model.safetensors")
    files = ModelFiles(LOCAL, ModelSource(name="acme/tiny", uri=tmp_path.as_uri()), tmp_path / "cache")
    assert files.folder() == tmp_path
    assert not (tmp_path / "cache").exists()
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in FIRST.items())


def test_configuration_and_tokenizer_are_copied_but_no_weights(memory: Any, tmp_path: Path) -> None:
    wanted = {
        name: name.encode()
        for name in (
            "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
            "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json",
        )
    }  # fmt: skip
    others = {
        "model.safetensors": save(FIRST),
        "README.md": b"",
        "onnx/config.json": b"",
        "pytorch_model.bin": b"",
    }
    folder = model(memory, tmp_path, {**wanted, **others}).folder()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"config.json": b"{}", **wanted}


def test_a_replaced_model_is_fetched_anew(memory: Any, tmp_path: Path) -> None:
    before = model(memory, tmp_path, {"tokenizer.json": b"old"}).folder()
    after = model(memory, tmp_path, {"tokenizer.json": b"new"}).folder()
    assert before == after
    assert (after / "tokenizer.json").read_bytes() == b"new"


def test_a_file_that_is_uploaded_at_this_moment_is_no_reason_to_give_the_pipeline_up(tmp_path: Path) -> None:
    class Growing(MemoryStore):
        def size(self, uri: str) -> int:
            return super().size(uri) + 1

    files = model(Growing(), tmp_path, sharded())
    with pytest.raises(StoreUnreachable, match=r"changed while it was being read: retry"):
        files.folder()


def test_a_file_that_the_replaced_model_has_no_more_is_gone(memory: Any, tmp_path: Path) -> None:
    model(memory, tmp_path, {"chat_template.jinja": b"old", "tokenizer.json": b"old"}).folder()
    del memory.objects[f"{URI}/chat_template.jinja"]
    folder = model(memory, tmp_path, {"tokenizer.json": b"new"}).folder()
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]


def test_models_at_one_address_of_two_stores_have_folders_of_their_own(tmp_path: Path) -> None:
    def copied(endpoint: str, config: bytes) -> Path:
        return model(MemoryStore(served_by=endpoint), tmp_path, {"config.json": config}).folder()

    one, other = copied("http://store-a:8333", b"[1]"), copied("http://store-b:8333", b"[2]")
    assert ((one / "config.json").read_bytes(), (other / "config.json").read_bytes()) == (b"[1]", b"[2]")


def test_what_is_kept_of_a_model_whose_address_says_all_stays_where_it_was(tmp_path: Path) -> None:
    store = MemoryStore(served_by="")
    store.objects["hf://acme/tiny/config.json"] = b"{}"
    files = ModelFiles(store, ModelSource(name="acme/tiny", uri="hf://acme/tiny", commit="c0ffee"), tmp_path)
    assert files.folder().name == hashlib.sha256(b"hf://acme/tiny c0ffee").hexdigest()[:16]


WEIGHTS = save(FIRST)


def headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + b"\0" * 4


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            WEIGHTS[:-1],
            rf"truncated: its tensors need {len(WEIGHTS)} bytes, it has {len(WEIGHTS) - 1}; upload it again",
        ),
        (WEIGHTS[:20], "truncated: its header alone needs"),
        (WEIGHTS[:5], "has 5 bytes and is not a safetensors file"),
        (b"", "has 0 bytes"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "is a pointer of Git LFS",
        ),
        ((3).to_bytes(8, "little") + b"{{{", "no valid safetensors header"),
        (WEIGHTS.replace(b'"F32"', b'"F99"'), "no valid safetensors header"),
        (headed(b"[" * 100_000), "no valid safetensors header"),
        (headed(b"[]"), "no valid safetensors header"),
        (
            headed(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}'),
            "no valid safetensors header",
        ),
        (
            headed(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0.0,4.0]}}'),
            "no valid safetensors header",
        ),
        (headed(b'{"a":{"dtype":"F32","shape":"1","data_offsets":[0,4]}}'), "no valid safetensors header"),
        (headed(b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}'), "no valid safetensors header"),
        (
            headed(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'),
            "a whole number of 5000 digits",
        ),
        (
            headed(b'{"a":{"dtype":"F32","shape":[' + b"1," * 10_000 + b'1],"data_offsets":[0,4]}}'),
            "a tensor has 10001 sides",
        ),
        ((2**25 + 1).to_bytes(8, "little") + bytes(10), "at most 32 MiB"),
        (WEIGHTS.replace(b"[3,4]", b"[3,5]"), r"shape \[3, 5\] and type F32 cannot have 48 bytes"),
    ],
)
def test_a_damaged_file_is_named_before_anything_is_loaded(
    memory: Any, tmp_path: Path, content: bytes, told: str
) -> None:
    files = model(memory, tmp_path, {"model.safetensors": content})
    with pytest.raises(BrokenModel, match=told) as caught:
        files.names()
    assert f"{URI}/model.safetensors" in str(caught.value)


def test_a_damaged_local_file_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS[:-1])
    with pytest.raises(BrokenModel, match="truncated"):
        ModelFiles(LOCAL, ModelSource(name="acme/tiny", uri=tmp_path.as_uri()), tmp_path).tensor("scale")


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"pytorch_model.bin": b""}, r"pickle files \(pytorch_model.bin\).*save_pretrained"),
        (
            {"README.md": b""},
            "neither model.safetensors nor model.safetensors.index.json; found README.md, config.json",
        ),
        ({"model.safetensors.index.json": b"[]"}, "not the index of a sharded model"),
        ({"model.safetensors.index.json": b'{"weight_map": {}}'}, "names no files"),
        (
            {name: content for name, content in sharded().items() if name != "model-2.safetensors"},
            "names model-2.safetensors, missing there",
        ),
        ({**sharded(), "model-2.safetensors": save(FIRST)}, "is in both"),
    ],
)
def test_a_folder_without_usable_weights_says_what_to_do(
    memory: Any, tmp_path: Path, files: dict[str, bytes], told: str
) -> None:
    with pytest.raises(BrokenModel, match=told):
        model(memory, tmp_path, files).names()


def test_a_folder_without_a_model_says_what_it_found(memory: Any, tmp_path: Path) -> None:
    memory.objects[f"{URI}/notes.txt"] = b""
    with pytest.raises(BrokenModel, match=r"config.json is missing; found notes.txt"):
        ModelFiles(memory, ModelSource(name="acme/tiny", uri=URI), tmp_path)


@pytest.mark.parametrize("more", [{}, {"config.json": b"{}"}])
def test_a_model_in_gguf_is_told_how_to_convert_it(
    memory: Any, tmp_path: Path, more: dict[str, bytes]
) -> None:
    memory.objects |= {f"{URI}/{name}": content for name, content in {"tiny.Q4_1.GGUF": b"", **more}.items()}
    with pytest.raises(BrokenModel, match=r"as GGUF \(tiny.Q4_1.GGUF\).* Convert it once"):
        ModelFiles(memory, ModelSource(name="acme/tiny", uri=URI), tmp_path).names()


@pytest.mark.parametrize(
    "index", [b"[" * 100_000, b"[]", b'{"weight_map": [1]}', b'{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none_is_named(memory: Any, tmp_path: Path, index: bytes) -> None:
    with pytest.raises(BrokenModel, match=r"not the index of a sharded model|is incomplete"):
        model(memory, tmp_path, {"config.json": b"{}", "model.safetensors.index.json": index}).names()


def test_an_unknown_tensor_is_named(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"no tensor lm_head.weight"):
        model(memory, tmp_path, {"model.safetensors": WEIGHTS}).tensor("lm_head.weight")


def test_a_folder_with_more_small_files_than_any_model_has_fills_no_disk(memory: Any, tmp_path: Path) -> None:
    names = {f"tokenizer-{number}.json": b"{}" for number in range(100)}
    with pytest.raises(BrokenModel, match="102 files of a configuration and a tokenizer, more than 64"):
        model(memory, tmp_path, {"tokenizer.json": b"{}", **names}).folder()
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(("name", "size"), [("config.json", 5 * 2**20), ("tokenizer_config.json", 5 * 2**20)])
def test_a_configuration_of_any_size_is_not_read(memory: Any, tmp_path: Path, name: str, size: int) -> None:
    files = model(memory, tmp_path, {"tokenizer.json": b"{}"})
    memory.objects[f"{URI}/{name}"] = bytes(size)
    files = ModelFiles(memory, ModelSource(name="acme/tiny", uri=URI), tmp_path)
    with pytest.raises(TooLarge, match=rf"{name} has more than 4 MiB"):
        files.folder()


def test_a_folder_of_any_number_of_objects_is_no_model(memory: Any, tmp_path: Path) -> None:
    memory.objects |= {f"{URI}/{number}": b"" for number in range(10_001)}
    with pytest.raises(StoreUnreachable, match="more than 10000 objects"):
        model(memory, tmp_path, {})


@pytest.mark.parametrize(
    "index",
    [b'{"weight_map": ' + b"[" * 10_000, b'{"weight_map": {"a": NaN}}', b'{"a": ' + b"9" * 5000 + b"}"],
)
def test_an_index_that_is_no_json_that_can_be_used_is_named(
    memory: Any, tmp_path: Path, index: bytes
) -> None:
    with pytest.raises(BrokenModel, match="not the index of a sharded model"):
        model(memory, tmp_path, {"model.safetensors.index.json": index}).names()
