"""``python -m mlora_worker.commands.survey``: what `mlora plan` must know of a base model and of tasks, without training.

Reads a ``SurveyQuestion`` as JSON from standard input and writes a ``SurveyAnswer`` to standard output. Only the model's
configuration and tokenizer are read, never its weights; and of each data set no more rows than asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mlora_worker.commands.stdio import ALL_NETWORKS, failure_of, reply, users_remote, users_store
from mlora_worker.data.errors import DataError
from mlora_worker.data.prepare import prepare
from mlora_worker.data.tokenizing.tokenizer import load_tokenizer
from mlora_worker.model.errors import ModelError
from mlora_worker.model.facts import model_facts, stage_shapes
from mlora_worker.protocol import (
    FailureReason,
    ModelFacts,
    RowSummary,
    StorageAccess,
    SurveyAnswer,
    SurveyQuestion,
    TaskAnswer,
    TaskQuestion,
)
from mlora_worker.storage.base_model.model_source import open_model
from mlora_worker.storage.errors import StorageError
from mlora_worker.storage.object_store.s3 import S3Timeouts
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources
from mlora_worker.stream.fit import misfit

# Somebody waits for the answer, which does not need the rows.
_TIMEOUTS = S3Timeouts(connect_seconds=2.0, read_seconds=10.0, attempts=1)
# Of a store that a cluster may reach where this machine does not, or with other keys.
_UNREAD = (FailureReason.STORAGE_UNREACHABLE, FailureReason.ACCESS_DENIED)


def main() -> None:
    reply("mlora_worker.commands.survey", SurveyQuestion, survey)


def survey(question: SurveyQuestion) -> SurveyAnswer:
    """Never raises for what is wrong with the model or a task: that is the answer."""
    dtype: torch.dtype = getattr(torch, question.model.dtype)
    try:
        folder = _folder(question)
        facts = model_facts(folder, question.stages, dtype)
        shapes = stage_shapes(folder, question.stages, dtype, question.model.quantization)
        tokenizer = load_tokenizer(folder)
    except (ModelError, StorageError, DataError) as error:
        return SurveyAnswer(failure=failure_of(error))
    tasks = tuple(_task(task, facts, tokenizer, question.sample_rows) for task in question.tasks)
    return SurveyAnswer(facts=facts, stages=shapes, tasks=tasks)


def _folder(question: SurveyQuestion) -> Path:
    store = users_store(question.storage, _TIMEOUTS)
    remote = users_remote(question.storage, question.hub_endpoint, _TIMEOUTS)
    return open_model(store, question.model, Path(question.cache_dir), remote).folder()


def _task(task: TaskQuestion, facts: ModelFacts, tokenizer: Any, sample: int) -> TaskAnswer:
    training = task.training.for_model(facts.max_positions)
    failure = misfit(facts, task.lora, training)
    if failure is not None or not sample:
        return TaskAnswer(uid=task.uid, failure=failure)
    if task.storage is None and task.dataset.addresses:
        return TaskAnswer(uid=task.uid)
    template = task.dataset.chat_template or task.template_text
    if template is None and task.dataset.chat_template_ref is not None:
        return TaskAnswer(
            uid=task.uid, unread="its chat template is in a ConfigMap, which this command cannot read"
        )
    try:
        access = task.storage or StorageAccess()
        source = open_sources(
            open_store(access, allow_files=True, allowed_networks=ALL_NETWORKS, timeouts=_TIMEOUTS),
            access,
            timeouts=_TIMEOUTS,
        )
        prepared = prepare(
            task.dataset,
            training,
            tokenizer,
            source,
            facts.max_positions,
            vocabulary=facts.vocab_size,
            text=task.dataset_text,
            template=template,
            most_rows=sample,
        )
    except (DataError, StorageError) as error:
        if error.reason in _UNREAD:
            return TaskAnswer(uid=task.uid, unread=str(error))
        return TaskAnswer(uid=task.uid, failure=failure_of(error))
    lengths = prepared.rows.lengths
    summary = RowSummary(
        counts=prepared.counts,
        whole=prepared.whole,
        mean=float(lengths.mean()),
        deviation=float(lengths.std()),
        longest=int(lengths.max()),
    )
    return TaskAnswer(uid=task.uid, rows=summary)


if __name__ == "__main__":
    main()
