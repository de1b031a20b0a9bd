"""The question goes to a process through a pipe; what it says, or how it ends, comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlora_operator.local.ranks import WORKER
from mlora_operator.local.survey import GGUF, LOOK, MERGE, SURVEY, SurveyFailed, ask
from mlora_worker.protocol import ModelSource, StorageAccess, SurveyQuestion

QUESTION = SurveyQuestion(
    model=ModelSource(name="m", uri="file:///m"),
    stages=1,
    storage=StorageAccess.model_validate({"accessKey": "the-key", "secretKey": "the-secret"}),
)


def process(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_the_answer_is_the_last_line_and_the_question_reaches_the_process() -> None:
    code = (
        "import sys, json; q = json.load(sys.stdin); print('a library says hello');"
        "words = q['model']['uri'] + q['storage']['accessKey'];"
        "print(json.dumps({'failure': {'reason': 'InvalidSpec', 'message': words}}))"
    )
    answer = ask(QUESTION, os.environ, command=process(code))
    assert answer.failure is not None
    assert answer.failure.message == "file:///mthe-key"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            process("import sys; print('no such module', file=sys.stderr); sys.exit(3)"),
            "exit code 3: no such module",
        ),
        (process("pass"), "exit code 0: it wrote no output"),
        (process("print('{\"stage\": 1}')"), "another version"),
        (("/nowhere/python",), "cannot be started"),
        (process("import time; time.sleep(60)"), "no answer after 1 seconds"),
    ],
)
def test_a_process_without_an_answer_says_how_it_ended(command: tuple[str, ...], words: str) -> None:
    with pytest.raises(SurveyFailed, match=words):
        ask(QUESTION, os.environ, seconds=1 if "sleep" in command[-1] else 30, command=command)


def test_all_programs_are_started_without_the_present_folder() -> None:
    assert {command[:-1] for command in (SURVEY, LOOK, MERGE, GGUF, WORKER)} == {(sys.executable, "-P", "-m")}


def test_no_file_of_the_present_folder_is_run(tmp_path: Path) -> None:
    """An adapter that was fetched may have a file of any name beside it; people change into its folder. The worker stands
    for all programs, which are started alike (above): it imports least."""
    for name in ("json", "logging", "typing", "pydantic"):
        (tmp_path / f"{name}.py").write_text("open('taken', 'w'); raise SystemExit(77)", encoding="utf-8")
    done = subprocess.run(WORKER, input="", capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert not (tmp_path / "taken").exists()
    assert done.returncode != 77
