"""Asks a worker process what a base model and its tasks are like: the operator itself knows no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError

from mlora_worker.protocol import (
    LookAnswer,
    LookQuestion,
    MergeAnswer,
    MergeQuestion,
    Message,
    SurveyAnswer,
    SurveyQuestion,
)

AnyAnswer = TypeVar("AnyAnswer", bound=Message)

# -P: no module comes from the present folder, which may be one that was fetched.
_MODULE = (sys.executable, "-P", "-m")
SURVEY = (*_MODULE, "mlora_worker.commands.survey")
LOOK = (*_MODULE, "mlora_worker.commands.inspect_rows")
MERGE = (*_MODULE, "mlora_worker.commands.merge")
GGUF = (*_MODULE, "mlora_worker.commands.gguf_export")
PLAIN = (*_MODULE, "mlora_worker.commands.plain_export")
_LONGEST_LINE = 400


class SurveyFailed(Exception):
    """The process ended without an answer."""


def ask(
    question: SurveyQuestion,
    environment: Mapping[str, str],
    seconds: float | None = None,
    command: Sequence[str] = SURVEY,
) -> SurveyAnswer:
    """The answer; the question, which may hold keys, goes through a pipe. Raises SurveyFailed."""
    return _answer(question, SurveyAnswer, environment, seconds, command)


def look(
    question: LookQuestion,
    environment: Mapping[str, str],
    seconds: float | None = None,
    command: Sequence[str] = LOOK,
) -> LookAnswer:
    """What a task would train on, in the same way."""
    return _answer(question, LookAnswer, environment, seconds, command)


def merge(
    question: MergeQuestion,
    environment: Mapping[str, str],
    seconds: float | None = None,
    command: Sequence[str] = MERGE,
) -> MergeAnswer:
    """An adapter in its base, in the same way."""
    return _answer(question, MergeAnswer, environment, seconds, command)


def _answer(
    question: Message,
    answer: type[AnyAnswer],
    environment: Mapping[str, str],
    seconds: float | None,
    command: Sequence[str],
) -> AnyAnswer:
    try:
        done = subprocess.run(
            command,
            input=question.to_json(),
            env={**environment, "TRANSFORMERS_VERBOSITY": "error"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise SurveyFailed(f"no answer after {seconds:g} seconds") from None
    except OSError as error:
        raise SurveyFailed(f"{command[0]} cannot be started: {error.strerror}") from error
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    try:
        if done.returncode == 0 and lines:
            return answer.model_validate_json(lines[-1])
    except ValidationError as error:
        raise SurveyFailed(f"its answer has another version: {error.errors()[0]['loc']}") from None
    words = [line for line in done.stderr.splitlines() if line.strip()] or ["it wrote no output"]
    raise SurveyFailed(f"it ended with exit code {done.returncode}: {words[-1][:_LONGEST_LINE]}")
