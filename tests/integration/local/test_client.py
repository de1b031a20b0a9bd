"""The client for Python where it really trains: the example notebook, and a task that fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mlora
from tests.fixtures.tiny_model import write_tiny_model

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[3] / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"
ROWS = EXAMPLES / "gsm8k" / "train.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for the rows of the examples, which have many of its small tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), positions=2048)


def cells() -> list[str]:
    """What a notebook's server would run, one cell after the other."""
    return [
        "".join(one["source"])
        for one in json.loads(NOTEBOOK.read_text())["cells"]
        if one["cell_type"] == "code"
    ]


def test_the_example_notebook_does_what_it_says(model: Path, tmp_path: Path) -> None:
    """In a loop that runs already, as a notebook's cells are."""
    shutil.copytree(EXAMPLES / "gsm8k", tmp_path / "gsm8k")
    program = f"""
import asyncio

async def notebook():
    names = {{}}
    for cell in {cells()!r}:
        exec(cell, names)
    print("loss", names["statuses"]["large"].loss)

asyncio.run(notebook())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=dict(os.environ) | {"MODEL_FOLDER": str(model)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Training" not in done.stderr, "nobody looks"
    assert "(AdapterUploaded)" in done.stdout or "AdapterUploaded: " in done.stdout  # in the log
    for name in ("small", "large"):
        folder = tmp_path / "notebook-fetched" / name
        manifest = json.loads((folder / "manifest.json").read_text())
        assert (manifest["name"], manifest["step"]) == (name, 4)
        losses = json.loads(
            next(line for line in done.stdout.splitlines() if line.startswith(name))[len(name) :]
        )
        assert len(losses) == 4
    last = next(line for line in done.stdout.splitlines() if line.startswith("loss "))
    assert float(last.split()[1]) == pytest.approx(losses[-1], abs=1e-3)


def test_the_notebook_has_no_output_that_may_be_out_of_date() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def spec(folder: Path, **dataset: Any) -> dict[str, Any]:
    return {
        "baseModel": "acme/tiny",
        "dataset": {
            "uri": ROWS.as_uri(),
            "format": "promptCompletion",
            "fields": {"prompt": "question", "completion": "answer"},
            **dataset,
        },
        "training": {"maxSteps": 2, "batchSize": 1},
        "output": {"uri": folder.as_uri()},
    }


def test_a_task_that_fails_keeps_no_other_one_from_its_end(model: Path, tmp_path: Path) -> None:
    client = mlora.Client.local({"acme/tiny": model}, state=tmp_path / "state")
    client.submit("good", spec(tmp_path / "good"))
    client.submit("bad", spec(tmp_path / "bad", fields={"prompt": "nothing", "completion": "answer"}))
    with pytest.raises(mlora.TaskNotSuccessful, match=r"loratask/bad failed: InvalidRow: .*nothing"):
        client.wait("good", "bad", progress=False)
    assert client.status("good").state == "Succeeded"
    assert client.wait("good", progress=False)["good"].step == 2  # it has ended, and does not train again
    assert {name: one.state for name, one in client.list().items()} == {"good": "Succeeded", "bad": "Failed"}
    with pytest.raises(mlora.AdapterMissing, match="loratask/bad has no adapter: it is Failed"):
        client.fetch("bad", tmp_path / "got")
    assert any(line.bad for line in client.logs("bad"))
    client.submit("bad", spec(tmp_path / "bad"), replace=True)
    assert client.wait("bad", progress=False)["bad"].step == 2


def test_a_run_that_takes_too_long_ends_with_its_processes(model: Path, tmp_path: Path) -> None:
    client = mlora.Client.local({"acme/tiny": model}, state=tmp_path / "state")
    client.submit("long", spec(tmp_path / "long") | {"training": {"maxSteps": 100_000}})
    with pytest.raises(mlora.TimedOut, match=r"within 1 seconds; state and logs: .*state"):
        client.wait("long", timeout="1s", progress=False)
    for pid in [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]:
        try:
            assert str(tmp_path).encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
