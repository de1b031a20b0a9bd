"""Tokenised rows on disk: the same rows as in memory, kept by content, private, pruned."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import Prepared, prepare
from mlora_worker.data.tokenizing.rendering import uses_date
from mlora_worker.data.training_rows.row_cache import RowCache, key_of, sweep
from mlora_worker.data.training_rows.row_files import FolderWriter, open_rows
from mlora_worker.data.training_rows.token_rows import MemoryWriter, TokenRows, rows_digest
from mlora_worker.protocol import Dataset, DatasetFields, FailureReason, StorageAccess, Training, TrainOn
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources

SOURCE = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


class Counting:
    """A tokenizer that counts the texts that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.texts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @property
    def backend_tokenizer(self) -> Any:
        outer = self

        class Backend:
            def __getattr__(self, name: str) -> Any:
                return getattr(outer._backend, name)

            def encode_batch(self, texts: list[str], **options: Any) -> Any:
                outer.texts += len(texts)
                return outer._backend.encode_batch(texts, **options)

        return Backend()


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Any]) -> Counting:
    return Counting(make_tokenizer(TEMPLATE, specials=["<s>", "</s>"], eos_token="</s>"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\n" + "".join(f"{n}?,answer {n}\n" for n in range(50)) + "x,\n")
    return path


def run(
    file: Path, tokenizer: Any, cache: RowCache | None, training: Training | None = None, **dataset: Any
) -> Prepared:
    return prepare(
        Dataset(uri=file.as_uri(), **dataset),
        training or Training(),
        tokenizer,
        SOURCE,
        1000,
        cache=cache,
    )


def test_rows_on_disk_are_those_in_memory_also_when_they_come_from_an_earlier_run(
    tmp_path: Path, file: Path, tokenizer: Counting
) -> None:
    cache = RowCache(tmp_path / "rows", "team-a")
    memory = run(file, tokenizer, None)
    for _ in range(2):
        disk = run(file, tokenizer, cache)
        assert disk.counts == memory.counts
        assert disk.rows.digest() == memory.rows.digest() == rows_digest(memory.rows)
        assert disk.rows.lengths.tolist() == [len(row.ids) for row in memory.rows]
        assert disk.rows.supervised.tolist() == memory.rows.supervised.tolist()
        assert (disk.rows[-1].labels == memory.rows[-1].labels).all()


def test_what_is_there_is_not_tokenised_again_and_what_differs_is(
    tmp_path: Path, file: Path, tokenizer: Counting, make_tokenizer: Callable[..., Any]
) -> None:
    cache = RowCache(tmp_path / "rows", "team-a")

    def work(**changes: Any) -> int:
        """Rows that had to be tokenised, apart from the encoder's own few texts."""
        given = {"tokenizer": tokenizer, "file": file, **changes}
        before = given["tokenizer"].texts
        run(cache=cache, **given)
        return int(given["tokenizer"].texts - before >= 50)

    assert [work(), work()] == [1, 0]
    assert work(limit=7, shuffle_seed=1) == 0, "which of the rows are chosen changes no row"
    assert work(held_out=0.1) == 0
    assert work(train_on=TrainOn.LAST_ANSWER) == 1
    assert work(training=Training(max_seq_length=64)) == 1
    assert work(training=Training(seed=7, batch_size=3)) == 0
    assert work(fields=DatasetFields(prompt="completion", completion="prompt")) == 1
    other = Counting(
        make_tokenizer(TEMPLATE.replace("<s>{{", "<s> {{"), specials=["<s>", "</s>"], eos_token="</s>")
    )
    assert [work(tokenizer=other), work(tokenizer=other)] == [1, 0]
    file.write_text(file.read_text().replace("answer", "another"))
    assert [work(), work()] == [1, 0]


@pytest.mark.parametrize("own", [False, True], ids=["the model's template", "the task's own"])
def test_rows_with_a_date_are_the_same_on_every_day_and_those_of_another_day_are_not_taken(
    tmp_path: Path, make_tokenizer: Callable[..., Any], own: bool
) -> None:
    dated = "<s>{{ strftime_now('%d %b %Y') }}</s>" + TEMPLATE
    plain = make_tokenizer(TEMPLATE, specials=["<s>", "</s>"], eos_token="</s>")
    tokenizer = plain if own else make_tokenizer(dated, specials=["<s>", "</s>"], eos_token="</s>")
    template = dated if own else None
    cache = RowCache(tmp_path / "rows", "team-a")
    rows = Dataset(inline='{"prompt": "a?", "completion": "b"}')

    def digest(day: date, cache: RowCache | None) -> str:
        made = prepare(rows, Training(), tokenizer, SOURCE, 1000, template=template, day=day, cache=cache)
        assert tokenizer.decode(made.rows[0].ids).startswith(f"<s>{day:%d %b %Y}</s>")
        return made.rows.digest()

    first, second = date(2026, 2, 27), date(2026, 2, 28)
    assert digest(first, cache) == digest(first, None)
    assert digest(second, cache) == digest(second, None) != digest(first, cache)
    assert len(list((tmp_path / "rows").glob("*/*"))) == 2
    assert not uses_date(plain)


def test_namespaces_share_nothing_and_only_the_owner_may_read(
    tmp_path: Path, file: Path, tokenizer: Counting
) -> None:
    run(file, tokenizer, RowCache(tmp_path / "rows", "team-a"))
    before = tokenizer.texts
    run(file, tokenizer, RowCache(tmp_path / "rows", "team-b"))
    assert tokenizer.texts - before >= 50
    files = [path for path in (tmp_path / "rows").rglob("*") if path.is_file()]
    assert len({path.parent.parent for path in files}) == 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_folder_that_was_damaged_or_never_finished_is_made_anew(
    tmp_path: Path, file: Path, tokenizer: Counting
) -> None:
    cache = RowCache(tmp_path / "rows", "team-a")
    expected = run(file, tokenizer, cache).rows.digest()
    for name in ("ids.i4", "meta.json", "ends.i8", "supervised.i4"):
        for harm in (lambda path: path.write_bytes(path.read_bytes()[:-4]), Path.unlink):
            (path,) = (tmp_path / "rows").rglob(name)
            harm(path)
            assert run(file, tokenizer, cache).rows.digest() == expected
            before = tokenizer.texts
            assert run(file, tokenizer, cache).rows.digest() == expected
            assert tokenizer.texts - before < 50, "the new one has its place"
    file.write_text("prompt,completion\na,b\nc\n")
    with pytest.raises(Exception, match="line 3"):
        run(file, tokenizer, cache)
    assert not list((tmp_path / "rows").rglob("*.partial"))


def test_rows_that_wait_keep_no_file_open(tmp_path: Path, file: Path, tokenizer: Counting) -> None:
    cache = RowCache(tmp_path / "rows", "team-a")
    made = [run(file, tokenizer, cache).rows]
    before = len(list(Path("/proc/self/fd").iterdir()))
    made += [run(file, tokenizer, cache).rows for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    shutil.rmtree(tmp_path / "rows")
    assert {rows_digest(rows) for rows in made} == {made[0].digest()}
    with pytest.raises(ValueError, match="read-only"):
        made[0][0].ids[0] = 1


def test_what_cannot_be_read_for_the_moment_is_not_removed(
    tmp_path: Path, file: Path, tokenizer: Counting
) -> None:
    cache = RowCache(tmp_path / "rows", "team-a")
    rows = run(file, tokenizer, cache).rows
    (meta,) = (tmp_path / "rows").rglob("meta.json")
    content = meta.read_bytes()
    meta.unlink()
    meta.symlink_to(meta)  # opening it is refused by the system, as where too many files are open
    assert cache.find(meta.parent.name) is None
    meta.unlink()
    meta.write_bytes(content)
    found = cache.find(meta.parent.name)
    assert found is not None
    assert found.rows.digest() == rows.digest()


def test_the_least_recently_used_go_when_there_are_too_many_bytes_and_mapped_rows_stay_readable(
    tmp_path: Path, file: Path, tokenizer: Counting
) -> None:
    first = run(file, tokenizer, RowCache(tmp_path / "rows", "team-a"))
    (folder,) = (tmp_path / "rows").glob("*/*")
    size = sum(path.stat().st_size for path in folder.iterdir())
    os.utime(folder, (1, 1))
    small = RowCache(tmp_path / "rows", "team-b", most_bytes=size + 10)
    run(file, tokenizer, small, train_on=TrainOn.LAST_ANSWER)
    assert not folder.exists()
    assert len(list((tmp_path / "rows").glob("*/*"))) == 1
    assert first.rows.digest() == rows_digest(first.rows)


def test_rows_on_the_disk_take_nothing_of_a_ranks_memory_budget_and_are_let_go_with_their_task(
    tmp_path: Path,
) -> None:
    """Nor may a data set be larger than the budget that is left: it is the disk that has it."""

    def kilobytes(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    tokens = 64 * 2**20
    for name, size in {"ids.i4": 4 * tokens, "learnt.u1": tokens}.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    (tmp_path / "ends.i8").write_bytes(tokens.to_bytes(8, "little"))
    (tmp_path / "supervised.i4").write_bytes(bytes(4))
    before = {name: kilobytes(name) for name in ("VmData", "VmSize")}
    rows = open_rows(tmp_path, "digest")
    assert kilobytes("VmSize") - before["VmSize"] > 300 * 1024
    assert kilobytes("VmData") - before["VmData"] < 16 * 1024
    view = rows[0].ids[-3:]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    del rows
    assert view.tolist() == [0, 0, 0], "what is in use stays"
    del view
    assert kilobytes("VmSize") - before["VmSize"] < 16 * 1024


def test_a_data_set_that_is_larger_than_the_cache_fails_alone_and_leaves_nothing(
    tmp_path: Path, file: Path, tokenizer: Counting
) -> None:
    first = run(file, tokenizer, RowCache(tmp_path / "rows", "team-a"), limit=20)
    (folder,) = (tmp_path / "rows").glob("*/*")
    names = ("ids.i4", "learnt.u1", "ends.i8", "supervised.i4", "weights.f8")
    size = sum((folder / name).stat().st_size for name in names)
    for room in (size, size - 1):
        cache = RowCache(tmp_path / f"rows-{room}", "team-b", most_bytes=room)
        with pytest.raises(DataError, match=r"which its first \d+ rows fill: set dataset\.limit") as caught:
            run(file, tokenizer, cache, limit=20 if room < size else None)
        assert caught.value.reason is FailureReason.INVALID_SPEC
        assert not list((tmp_path / f"rows-{room}").glob("*/*"))
    exact = RowCache(tmp_path / "exact", "team-b", most_bytes=size)
    assert run(file, tokenizer, exact, limit=20).rows.digest() == first.rows.digest()


def test_a_disk_without_room_is_named(tmp_path: Path, file: Path, tokenizer: Counting) -> None:
    (tmp_path / "rows").write_text("no folder")
    with pytest.raises(OSError, match="give the worker more scratch space"):
        run(file, tokenizer, RowCache(tmp_path / "rows", "team-a"))


class SmallDisk:
    """A disk of ``size`` bytes for the rows below ``root``, of which ``others`` take some."""

    def __init__(self, root: Path, size: int, others: int = 0) -> None:
        self._root, self._size, self.others = root, size, others

    def volume(self, _: Path) -> tuple[int, int]:
        held = sum(path.stat().st_size for path in self._root.rglob("*") if path.is_file())
        return self._size, self._size - self.others - held

    def writer(self, folder: Path, most_bytes: int) -> FolderWriter:
        outer = self

        class Writer(FolderWriter):
            def finish(self) -> TokenRows:
                rows = super().finish()
                if outer.volume(folder)[1] < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return rows

        return Writer(folder, most_bytes)


def folders(root: Path) -> set[Path]:
    return set(root.glob("*/*"))


def test_what_is_kept_makes_room_so_that_a_tenth_of_the_disk_is_free_for_others(
    tmp_path: Path, file: Path, tokenizer: Counting
) -> None:
    root = tmp_path / "rows"
    run(file, tokenizer, RowCache(root, "team-a"))
    (first,) = folders(root)
    size = sum(path.stat().st_size for path in first.iterdir())
    disk = SmallDisk(root, 10 * size)
    cache = RowCache(root, "team-b", volume=disk.volume, writer=disk.writer)
    os.utime(first, (1, 1))
    run(file, tokenizer, cache, train_on=TrainOn.LAST_ANSWER)
    assert len(folders(root)) == 2, "there is room enough"
    disk.others = 8 * size
    with cache.writing():
        assert first not in folders(root), "what was used last stays"
        assert len(folders(root)) == 2
    assert len(folders(root)) == 1


def test_a_disk_that_gets_full_has_the_room_of_all_that_is_kept_and_then_says_so(
    tmp_path: Path, file: Path, tokenizer: Counting
) -> None:
    root = tmp_path / "rows"
    expected = run(file, tokenizer, RowCache(root, "team-a")).rows.digest()
    (first,) = folders(root)
    size = sum(path.stat().st_size for path in first.iterdir())
    # It has room for one, and seems to have much more: what others write there nobody foresees.
    disk = SmallDisk(root, size + size // 2)
    cache = RowCache(root, "team-b", volume=lambda _: (100 * size, 50 * size), writer=disk.writer)
    assert run(file, tokenizer, cache).rows.digest() == expected
    assert first not in folders(root)
    disk.others = size
    with pytest.raises(OSError, match="No space left on device; give the worker more") as caught:
        run(file, tokenizer, cache, train_on=TrainOn.LAST_ANSWER)
    assert caught.value.errno == errno.ENOSPC
    assert not folders(root)


def test_rows_that_are_being_written_count(tmp_path: Path, file: Path, tokenizer: Counting) -> None:
    root = tmp_path / "rows"
    run(file, tokenizer, RowCache(root, "team-a"))
    (first,) = folders(root)
    size = sum(path.stat().st_size for path in first.iterdir())
    cache = RowCache(root, "team-b", most_bytes=2 * size)
    with cache.writing() as writer:
        (writer.folder / "ids.i4").write_bytes(bytes(size + 1))
        cache.prune()
        assert folders(root) == {writer.folder}


def test_what_a_killed_writer_has_left_is_removed_and_what_is_being_written_is_not(
    tmp_path: Path, file: Path, tokenizer: Counting
) -> None:
    root = tmp_path / "rows"
    killed = os.fork()
    if killed == 0:
        with RowCache(root, "team-a").writing():
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    (left,) = root.glob("*/*.partial")
    with RowCache(root, "team-a").writing() as writer:
        sweep(root)
        assert [writer.folder] == list(root.glob("*/*.partial"))
        assert not left.exists()
    assert not list(root.glob("*/*.partial"))
    left.mkdir()
    run(file, tokenizer, RowCache(root, "team-b"))
    assert not left.exists(), "whoever writes next removes it, too"


def test_keys_tell_all_that_decides_apart() -> None:
    keys = {
        key_of([("a", "1")], "t", [1]),
        key_of([("a", "2")], "t", [1]),
        key_of([("b", "1")], "t", [1]),
        key_of([("a", "1"), ("b", "1")], "t", [1]),
        key_of([("a", "1")], "u", [1]),
        key_of([("a", "1")], "t", [2]),
    }
    assert len(keys) == 6


def test_rows_in_memory_are_a_sequence() -> None:
    writer = MemoryWriter()
    for length in (3, 1, 2):
        ids = np.arange(length, dtype=np.int32)
        writer.add(ids, ids >= 0, ids, length)
    rows = writer.finish()
    assert [len(row.ids) for row in rows] == [len(row.ids) for row in rows[:]] == [3, 1, 2]
    assert rows.chosen(np.array([2, 0])).lengths.tolist() == [2, 3]
    assert [row.ids.tolist() for row in rows.chosen(np.array([2, 0]))] == [[0, 1], [0, 1, 2]]
    with pytest.raises(IndexError):
        rows[3]
