"""Output survives any encoding, and pipes stand where files do."""

from __future__ import annotations

import io
import os
import stat
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
