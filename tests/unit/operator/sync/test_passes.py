"""A pass makes folder and servers equal to the store, whatever the store, the servers and former passes have left."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mlora_operator.download import Access, open_source
from mlora_operator.sync import (
    News,
    Places,
    ShownAdapters,
    SyncPass,
    joined,
    open_folder,
    parse_server,
    places_below,
)
from tests.fixtures.model_server import BASE, FakeModelServer, model_server
from tests.fixtures.published import publish, published_config

Told = list[tuple[str, str]]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    publish(tmp_path / "store" / "bot")
    return tmp_path / "store"


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[ShownAdapters]:
    with open_folder(tmp_path / "shown") as folder:
        yield folder


@pytest.fixture
def server() -> Iterator[FakeModelServer]:
    with model_server() as made:
        yield made


def below(*stores: Path) -> Places:
    return joined(places_below(one.as_uri(), open_source(one.as_uri(), Access())) for one in stores)


def news_of(
    shown: ShownAdapters,
    places: Places,
    *servers: FakeModelServer,
    prune: bool = False,
    base_model: str | None = None,
) -> Sequence[News]:
    asked = [parse_server(f"{one.kind}={one.url}", None, lambda _: None) for one in servers]
    return list(SyncPass(shown, str(shown.folder), asked, prune, base_model, lambda _: None).run(places))


def told(news: Sequence[News]) -> Told:
    return [(one.kind.value, one.name) for one in news]


def weights(shown: ShownAdapters, name: str = "bot") -> bytes:
    return (shown.folder / name / "adapter_model.safetensors").read_bytes()


def versions(shown: ShownAdapters, name: str = "bot") -> int:
    folder = shown.folder / ".versions" / name
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_an_adapter_comes_is_replaced_and_goes(
    shown: ShownAdapters, store: Path, server: FakeModelServer
) -> None:
    assert told(news_of(shown, below(store), server)) == [("added", "bot"), ("loaded", "bot")]
    first = server.adapters["bot"]
    assert told(news_of(shown, below(store), server)) == []
    publish(store / "bot", b"better")
    assert told(news_of(shown, below(store), server)) == [("replaced", "bot"), ("reloaded", "bot")]
    assert weights(shown) == b"better"
    assert server.adapters["bot"] != first  # servers remember what they computed by the path
    assert Path(server.adapters["bot"]).resolve() == (shown.folder / "bot").resolve()
    assert versions(shown) == 2  # a reader may just have opened the former one
    news_of(shown, below(store), server)
    assert versions(shown) == 1
    shutil.rmtree(store / "bot")
    assert told(news_of(shown, below(store), server)) == []  # it was not said
    assert told(news_of(shown, below(store), server, prune=True)) == [("removed", "bot"), ("unloaded", "bot")]
    assert (server.adapters, shown.shown()) == ({}, {})
    news_of(shown, below(store), server)
    assert versions(shown) == 0


def test_a_server_that_has_been_restarted_gets_everything_again(
    shown: ShownAdapters, store: Path, server: FakeModelServer
) -> None:
    news_of(shown, below(store), server)
    server.adapters.clear()
    assert told(news_of(shown, below(store), server)) == [("loaded", "bot")]


def test_what_a_server_would_compute_wrongly_is_kept_from_it_and_the_others_are_loaded(
    shown: ShownAdapters, store: Path, server: FakeModelServer
) -> None:
    experts = {"target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}
    published_config(store / "experts", experts)
    server.version = {"version": "0.31.0"}
    news = news_of(shown, below(store), server)
    assert told(news) == [
        ("added", "bot"),
        ("added", "experts"),
        ("loaded", "bot"),
        ("problem", "experts"),
    ]
    assert "need vLLM 0.32 or newer" in news[-1].message
    server.version = {"version": "0.32.0"}
    assert told(news_of(shown, below(store), server)) == [("loaded", "experts")]
    [*_, (_, asked), _] = server.asked
    assert (asked["lora_name"], asked["is_3d_lora_weight"]) == ("experts", True)
    published_config(store / "bot", {"use_rslora": True, "rank_pattern": {"q_proj": 4}})
    server.version = {}
    assert told(news_of(shown, below(store), server)) == [("replaced", "bot"), ("problem", "bot")]
    assert server.adapters.keys() == {"bot", "experts"}  # the former one answers on


def test_what_is_shown_is_loaded_though_the_store_is_away(
    shown: ShownAdapters, store: Path, server: FakeModelServer
) -> None:
    news_of(shown, below(store))
    shutil.rmtree(store)
    assert told(news_of(shown, below(store), server, prune=True)) == [("problem", ""), ("loaded", "bot")]


def test_an_adapter_that_is_not_finished_is_waited_for(shown: ShownAdapters, store: Path) -> None:
    (store / "bot" / "manifest.json").unlink()
    assert told(news_of(shown, below(store))) == []
    publish(store / "bot")
    assert told(news_of(shown, below(store))) == [("added", "bot")]


def test_an_adapter_stays_while_another_one_is_uploaded_in_its_stead(
    shown: ShownAdapters, store: Path
) -> None:
    news_of(shown, below(store))
    (store / "bot" / ".mlora-upload.json").write_text("{}")
    (store / "bot" / "manifest.json").unlink()
    assert told(news_of(shown, below(store), prune=True)) == []
    (store / "bot" / ".mlora-upload.json").unlink()
    assert told(news_of(shown, below(store), prune=True)) == [("removed", "bot")]


def test_an_adapter_stays_while_its_task_trains_again(shown: ShownAdapters, store: Path) -> None:
    news_of(shown, below(store))
    (store / "bot" / "checkpoints" / "u").mkdir(parents=True)
    (store / "bot" / "manifest.json").unlink()
    assert told(news_of(shown, below(store), prune=True)) == []
    shutil.rmtree(store / "bot" / "checkpoints")
    assert told(news_of(shown, below(store), prune=True)) == [("removed", "bot")]


SHA = hashlib.sha256(b"weights").hexdigest()


def one_file(**changes: object) -> list[object]:
    config = {"name": "adapter_config.json", "bytes": 8, "sha256": hashlib.sha256(b'{"r": 8}').hexdigest()}
    return [{"name": "adapter_model.safetensors", "bytes": 7, "sha256": SHA} | changes, config]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (one_file(name="../../escaped.json"), "names a file that no adapter has"),
        (one_file(name="/etc/escaped.json"), "names a file that no adapter has"),
        (one_file(name=".hidden.json"), "names a file that no adapter has"),
        (one_file(bytes=6), "has 7 bytes or more where the manifest says 6"),
        (one_file(bytes=8), "has 7 bytes where the manifest says 8"),
        (one_file(bytes=2**50), "make room"),
        (one_file(bytes=-1), "has no size"),
        (one_file(sha256="0" * 64), "does not match the SHA-256"),
        (one_file() + one_file(name="missing.json")[:1], "is in the manifest but not in the store"),
        (one_file() * 2, "names adapter_model.safetensors twice"),
        ([], "names no adapter_config.json and no adapter_model.safetensors"),
        (one_file()[:1], "names no adapter_config.json"),
        (one_file(name="README.md"), "names no adapter_model.safetensors"),
        ("none", "is not an adapter's manifest"),
    ],
)
def test_a_manifest_that_lies_changes_nothing_that_is_shown(
    shown: ShownAdapters, store: Path, server: FakeModelServer, files: object, words: str, tmp_path: Path
) -> None:
    publish(store / "other")
    news_of(shown, below(store), server)
    loaded = dict(server.adapters)
    publish(store / "bot", files=files)
    (problem,) = news_of(shown, below(store), server, prune=True)
    assert (problem.kind, problem.name) == ("problem", "bot")
    assert words in problem.message
    assert weights(shown) == b"weights"
    assert server.adapters == loaded
    assert list(tmp_path.rglob("*escaped*")) == []


@pytest.mark.parametrize("file", ["manifest.json", "adapter_config.json"])
def test_a_pipe_in_a_store_keeps_no_other_adapter_back(shown: ShownAdapters, store: Path, file: str) -> None:
    publish(store / "a")
    (store / "a" / file).unlink()
    os.mkfifo(store / "a" / file)
    news = news_of(shown, below(store))
    assert told(news) == [("problem", "a"), ("added", "bot")]
    assert f"{store}/a/{file} is not a regular file" in news[0].message


def test_a_link_below_a_prefix_shows_nothing_from_elsewhere(
    shown: ShownAdapters, store: Path, tmp_path: Path
) -> None:
    (store / "a").symlink_to(publish(tmp_path / "of-another"))
    (tmp_path / "mount").symlink_to(store)
    news = news_of(shown, below(tmp_path / "mount"))
    assert told(news) == [("problem", "a"), ("added", "bot")]
    assert "is a symbolic link, which is not followed" in news[0].message


def test_names_that_differ_in_case_are_two_adapters(shown: ShownAdapters, store: Path) -> None:
    publish(store / "Bot", b"other")
    assert told(news_of(shown, below(store))) == [("added", "Bot"), ("added", "bot")]
    assert (weights(shown), weights(shown, "Bot")) == (b"weights", b"other")


def test_one_that_is_wrong_keeps_no_other_one_back(
    shown: ShownAdapters, store: Path, server: FakeModelServer
) -> None:
    publish(store / "a", files="none")
    publish(store / "z")
    server.refuses["bot"] = "rank 48 is too high"
    assert told(news_of(shown, below(store), server)) == [
        ("problem", "a"),
        ("added", "bot"),
        ("added", "z"),
        ("problem", "bot"),
        ("loaded", "z"),
    ]


def test_two_adapters_with_one_name_leave_what_is_shown(
    shown: ShownAdapters, store: Path, server: FakeModelServer, tmp_path: Path
) -> None:
    news_of(shown, below(store), server)
    publish(tmp_path / "second" / "bot", b"other")
    both = below(store, tmp_path / "second")
    assert told(news_of(shown, both, server, prune=True)) == [("problem", "bot")]
    assert weights(shown) == b"weights"
    assert set(server.adapters) == {"bot"}


def test_a_task_that_has_not_finished_yet_keeps_what_is_shown_under_its_name(
    shown: ShownAdapters, store: Path
) -> None:
    news_of(shown, below(store))
    assert told(news_of(shown, Places(held=frozenset({"bot"})), prune=True)) == []
    assert told(news_of(shown, Places(complete=False), prune=True)) == []
    assert told(news_of(shown, Places(), prune=True)) == [("removed", "bot")]


def test_only_adapters_of_the_servers_base_model_are_shown(shown: ShownAdapters, store: Path) -> None:
    publish(store / "other", baseModel="acme/larger")
    assert told(news_of(shown, below(store), base_model=BASE)) == [("added", "bot")]
    publish(store / "bot", baseModel="acme/larger")
    assert told(news_of(shown, below(store), base_model=BASE, prune=True)) == [("removed", "bot")]


def test_an_adapter_that_somebody_else_has_loaded_is_not_replaced(
    shown: ShownAdapters, store: Path, server: FakeModelServer
) -> None:
    server.adapters = {"bot": "/elsewhere/bot", "more": "/elsewhere/more"}
    publish(store / "acme")
    news = news_of(shown, below(store), server, prune=True)
    assert ("problem", "bot") in told(news)
    assert "has an adapter from /elsewhere/bot of this name, which is not replaced" in news[-1].message
    assert (server.adapters["bot"], server.adapters["more"]) == ("/elsewhere/bot", "/elsewhere/more")


def test_what_a_server_was_started_with_from_the_folder_is_replaced_too(
    shown: ShownAdapters, store: Path, server: FakeModelServer
) -> None:
    news_of(shown, below(store))
    server.adapters = {"bot": str(shown.folder / "bot")}
    assert told(news_of(shown, below(store), server)) == [("reloaded", "bot")]


def test_a_version_stays_as_long_as_a_server_has_it_or_does_not_say(
    shown: ShownAdapters, store: Path, server: FakeModelServer
) -> None:
    news_of(shown, below(store), server)
    publish(store / "bot", b"better")
    server.refuses["bot"] = "no memory"
    for _ in range(3):
        assert told(news_of(shown, below(store), server))[-1] == ("problem", "bot")
    assert Path(server.adapters["bot"]).is_dir()
    assert versions(shown) == 2
    del server.refuses["bot"]
    server.fails = [(503, b"starting")] * 4
    assert told(news_of(shown, below(store), server)) == [("problem", "")]
    assert versions(shown) == 2
    news_of(shown, below(store), server)
    news_of(shown, below(store), server)
    assert versions(shown) == 1


def test_a_server_that_does_not_answer_keeps_no_other_one_back(shown: ShownAdapters, store: Path) -> None:
    with model_server() as one, model_server("sglang") as other:
        one.fails = [(503, b"starting")] * 4
        assert told(news_of(shown, below(store), one, other)) == [
            ("added", "bot"),
            ("problem", ""),
            ("loaded", "bot"),
        ]


def test_a_server_that_sees_the_folder_elsewhere_is_given_its_own_path(
    shown: ShownAdapters, store: Path, server: FakeModelServer, tmp_path: Path
) -> None:
    (tmp_path / "mounted").symlink_to(shown.folder)
    asked = [parse_server(f"vllm={server.url}", None, lambda _: None)]
    one = SyncPass(shown, str(tmp_path / "mounted"), asked, True, None, lambda _: None)
    assert told(list(one.run(below(store)))) == [("added", "bot"), ("loaded", "bot")]
    assert server.adapters["bot"].startswith(f"{tmp_path}/mounted/.versions/bot/")
    assert told(list(one.run(below(store)))) == []


def test_a_manifest_is_kept_as_it_came(shown: ShownAdapters, store: Path) -> None:
    publish(store / "bot", more={"a": 1})
    news_of(shown, below(store))
    assert json.loads((shown.folder / "bot" / "manifest.json").read_text())["more"] == {"a": 1}


@pytest.mark.parametrize("status", [404, 503])
def test_a_server_that_tells_no_version_keeps_only_the_adapter_that_needs_one(
    shown: ShownAdapters, store: Path, server: FakeModelServer, status: int
) -> None:
    server.version = status
    published_config(store / "aaa", {"rank_pattern": {"q_proj": 4}})
    news = news_of(shown, below(store), server)
    assert [*server.adapters] == ["bot"]
    [said] = [one for one in news if one.kind.value == "problem"]
    assert said.name == "aaa"
    assert "need vLLM 0.32 or newer, and this one does not say its version" in said.message
