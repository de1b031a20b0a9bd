"""Which adapters there are below an address, and under which names: no name is a path, and none has two adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlora_operator.download import Access, AdapterFolders, AdapterNotFound, StoreSilent, open_source
from mlora_operator.sync.places import MOST_ADAPTERS, is_usable, joined, places_below
from tests.fixtures.published import publish


class Store:
    """Says which folders it has, whatever these are called."""

    def __init__(self, *names: str, then: Exception | None = None) -> None:
        self._names, self._then = names, then

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        raise AdapterNotFound(f"{name} from {start}")
        yield b""

    def names(self) -> Iterator[str]:
        yield from self._names
        if self._then is not None:
            raise self._then

    def below(self, name: str) -> AdapterFolders:
        return Store(name)


def test_what_is_directly_below_an_address_is_found_and_nothing_deeper(tmp_path: Path) -> None:
    publish(tmp_path / "a")
    publish(tmp_path / "b")
    publish(tmp_path / "b" / "checkpoints" / "step-1")
    (tmp_path / "file").write_text("no folder")
    found = places_below(tmp_path.as_uri() + "/", open_source(tmp_path.as_uri(), Access()))
    assert [(one.name, one.uri) for one in found.found] == [
        ("a", f"{tmp_path.as_uri()}/a"),
        ("b", f"{tmp_path.as_uri()}/b"),
    ]
    assert found.complete


def test_the_address_of_one_adapter_is_that_adapter(tmp_path: Path) -> None:
    publish(tmp_path / "bot")
    publish(tmp_path / "bot" / "checkpoints")
    uri = (tmp_path / "bot").as_uri()
    (one,) = places_below(uri, open_source(uri, Access())).found
    assert (one.name, one.uri) == ("bot", uri)


@pytest.mark.parametrize(
    "name", ["..", ".", "", ".hidden", "a/b", "a\\b", "a b", "a\x1b[2J", "-rf", "ä", "a" * 129, "a\n", "%2e"]
)
def test_a_name_that_is_no_folders_is_named_and_left_out(name: str) -> None:
    found = places_below("s3://b/p", Store("good", name))
    assert [one.name for one in found.found] == ["good"]
    (problem,) = found.problems
    assert "cannot be the name of an adapter" in problem.message
    assert not is_usable(name)
    assert len(problem.message) < 400


def test_a_store_that_breaks_off_gives_nothing_and_is_not_complete() -> None:
    found = places_below("s3://b/p", Store("a", then=StoreSilent("gone")))
    assert (found.found, found.complete) == ((), False)
    assert "gone" in found.problems[0].message


def test_a_folder_that_is_not_there_is_no_empty_store(tmp_path: Path) -> None:
    uri = (tmp_path / "nothing").as_uri()
    assert not places_below(uri, open_source(uri, Access())).complete


def test_a_store_without_end_is_left_off() -> None:
    found = places_below("s3://b/p", Store(*(f"n{n}" for n in range(MOST_ADAPTERS + 1))))
    assert (found.found, found.complete) == ((), False)
    assert "more than 10,000 folders" in found.problems[0].message


def test_of_two_adapters_with_one_name_neither_is_taken() -> None:
    found = joined([places_below("s3://b/p", Store("bot", "own")), places_below("s3://b/q", Store("bot"))])
    assert [one.name for one in found.found] == ["own"]
    assert found.held == {"bot"}
    assert found.complete
    (problem,) = found.problems
    assert "s3://b/p/bot and" in problem.message


def test_the_same_address_twice_is_one_adapter() -> None:
    found = joined([places_below("s3://b/p", Store("bot")), places_below("s3://b/p/", Store("bot"))])
    assert [one.uri for one in found.found] == ["s3://b/p/bot"]
    assert not found.problems
