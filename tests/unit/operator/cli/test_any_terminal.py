"""Output survives any encoding, and pipes stand where files do."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlora_operator.cli import encoding
from mlora_operator.cli.output import stdout
from mlora_operator.cli.pipes import as_file
from mlora_operator.cli.validate.command import read_texts
from mlora_operator.cli.validate.data_check import question_of
from mlora_operator.local.manifests import read_manifests
from tests.fixtures.kube_server import KubeServer
from tests.fixtures.spoken import mlora


@pytest.mark.parametrize("name", ["ascii", "latin-1", "cp437", "utf-8"])
def test_what_a_terminal_cannot_show_is_spelt_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=name))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding=name))
    encoding.spell_out_what_cannot_be_shown()
    stdout().print("███ ⟦ä⟧ 猫", markup=False)
    sys.stdout.flush()
    shown = raw.getvalue().decode(name)
    assert {
        "ascii": "### [[\\xe4]] \\u732b\n",
        "latin-1": "### [[ä]] \\u732b\n",
        "cp437": "███ [[ä]] \\u732b\n",
        "utf-8": "███ ⟦ä⟧ 猫\n",
    }[name] == shown


def piped(folder: Path, content: bytes) -> str:
    """A named pipe that gives ``content`` once."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_bytes, args=(content,), daemon=True).start()
    return str(pipe)


def test_a_pipe_is_kept_as_a_private_file_and_read_once(tmp_path: Path) -> None:
    pipe = piped(tmp_path, b"rows")
    kept = as_file(pipe)
    assert kept.read_bytes() == b"rows"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert as_file(pipe) == kept
    file = tmp_path / "file"
    file.touch()
    assert as_file(str(file)) == file
    assert as_file(str(tmp_path / "rows-*.jsonl")) == tmp_path / "rows-*.jsonl"  # a pattern is no file


def test_a_kubeconfig_may_be_a_pipe(kube: KubeServer, tmp_path: Path) -> None:
    kube.task("a")
    content = kube.kubeconfig(tmp_path / "config").read_bytes()
    said = mlora("list", "-o", "name", "--kubeconfig", piped(tmp_path, content))
    assert (said.code, said.out) == (0, "loratask.mlora.dev/a\n")


def test_rows_may_be_a_pipe_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"typed")))
    for data, content in ((piped(tmp_path, b"piped"), b"piped"), ("-", b"typed")):
        question = question_of(read_manifests([]), data, "hf://acme/base", {}, [], 3)
        (address,) = question.dataset.addresses
        assert Path(address.removeprefix("file://")).read_bytes() == content


def test_standard_input_is_utf_8_whatever_the_terminal_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = io.TextIOWrapper(io.BytesIO("ä\r\nb".encode()), encoding="latin-1")
    monkeypatch.setattr(sys, "stdin", typed)
    assert read_texts(["-"]) == [("standard input", "ä\nb")]


@pytest.mark.parametrize(
    "arguments",
    [("list", "-n", "../x"), ("get", "../x"), ("logs", "a/b"), ("suspend", "a%2fb")],
)
def test_a_name_that_is_a_path_is_refused_in_words(kube: KubeServer, arguments: tuple[str, ...]) -> None:
    found = mlora(*arguments)
    assert (found.code, kube.asked) == (2, [])
    assert found.err == f"error: {arguments[-1]!r} is not a name that Kubernetes can have\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "Is a directory"),
        (b"", "it does not hold clusters, users and contexts"),
        (b"- 1\n", "it does not hold clusters, users and contexts"),
        ("kind: Config\n".encode("utf-16"), "codec can't decode"),
        (b"a: [", "while parsing"),
    ],
    ids=["a folder", "empty", "a list", "UTF-16", "cut off"],
)
def test_what_is_no_kubeconfig_ends_in_words(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "config"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    found = mlora("list", "--kubeconfig", str(file))
    assert found.code == 4
    assert found.err.startswith(f"error: no usable kubeconfig at {file}: ")
    assert words in found.err


def run_as_program(*arguments: str, out: int, **environment: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from mlora_operator.cli import main; main()", *arguments]
    return subprocess.run(
        program, stdout=out, stderr=subprocess.PIPE, env=os.environ | environment, text=True, check=False
    )


def test_an_output_that_is_full_is_said_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("apiVersion: v1\nkind: Secret\nmetadata: {name: a}\n")
    with Path("/dev/full").open("w") as full:
        done = run_as_program("validate", str(file), out=full.fileno())
    assert (done.returncode, done.stderr) == (
        2,
        "error: the output cannot be written: No space left on device\n",
    )


def test_a_terminal_without_a_width_shows_something_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("apiVersion: v1\nkind: Secret\nmetadata: {name: a}\n")
    done = run_as_program("validate", str(file), out=subprocess.PIPE, COLUMNS="0")
    assert done.stdout == "valid: 1 Secret\n"


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n"])
def test_a_file_without_objects_is_not_valid(tmp_path: Path, content: str) -> None:
    """Such as from a pipe whose program failed."""
    file = tmp_path / "a.yaml"
    file.write_text(content)
    found = mlora("validate", str(file))
    assert (found.code, found.err) == (2, "error: these files contain no objects\n")
