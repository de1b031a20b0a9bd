"""What runs the tests of `make unit` tells of each test what became of it, also of one whose process is gone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "test_outcomes.py": """
import pytest

@pytest.fixture(scope="module")
def made():
    yield
    raise ValueError("broken at its end")

def test_passes(tmp_path): (tmp_path / "file").touch()
def test_fails(): print("said before"); assert 1 == 2
@pytest.mark.skip(reason="for no reason")
def test_is_skipped(): pass
def test_leaves_a_fixture(made): pass
""",
    "test_ends_well.py": "import os\ndef test_ends(): os._exit(0)",
    "test_is_killed.py": "import os\ndef test_is_killed(): os.kill(os.getpid(), 9)",
}
STARTS_A_THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


def run(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.fixtures.forked_tests",
        "-ra",
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *options, str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_every_outcome_is_told(tmp_path: Path) -> None:
    status, said = run(tmp_path, FILES, "--forks=3", "-p", "no:cacheprovider")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "3 failed, 2 passed, 1 skipped" in said
    assert "1 error" in said
    for words in (
        "assert 1 == 2",
        "said before",
        "broken at its end",
        "for no reason",
        "test_ends_well.py::test_ends",
        "its process ended with 0 (",
        "test_is_killed.py::test_is_killed",
        "its process ended with -9 (",
    ):
        assert words in said


def test_where_the_run_ends_early_fixtures_end_what_they_started_in_every_process(tmp_path: Path) -> None:
    files = {
        "conftest.py": """
import pathlib, pytest
begun, ended = (pathlib.Path(__file__).with_name(name) for name in ("begun", "ended"))

@pytest.fixture(scope="session")
def server():
    begun.touch()
    yield
    ended.touch()
""",
        "test_fails.py": """
import conftest, time

def test_it():
    while not conftest.begun.exists():
        time.sleep(0.01)
    assert 0
""",
        "test_waits.py": "import time\ndef test_it(server): time.sleep(60)",
    }
    status, said = run(tmp_path, files, "--forks=2", "-x", "-p", "no:cacheprovider")
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert (tmp_path / "ended").exists()


def test_files_that_took_long_the_last_time_and_new_ones_come_first(tmp_path: Path) -> None:
    files = {
        "test_a.py": "def test_short(): pass",
        "test_b.py": "import time\ndef test_long(): time.sleep(0.2)",
    }
    for new, order in (({}, ["a", "b"]), ({"test_c.py": "def test_new(): pass"}, ["c", "b", "a"])):
        status, said = run(tmp_path, files | new, "--forks=1", "-v")
        assert status == pytest.ExitCode.OK, said
        assert re.findall(r"test_(\w)\.py::test_\w+ PASSED", said) == order


@pytest.mark.parametrize(
    ("text", "option", "words"),
    [
        (STARTS_A_THREAD, "--forks=2", "importing the test files has started threads, which no fork has"),
        ("import colorsys\n", "--without=colorsys", "a test file of this part imports colorsys"),
    ],
)
def test_what_would_hang_or_take_seconds_is_refused(
    tmp_path: Path, text: str, option: str, words: str
) -> None:
    status, said = run(tmp_path, {"test_one.py": text + "def test_it(): pass"}, option)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert words in said
