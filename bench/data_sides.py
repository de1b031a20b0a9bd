"""The two sides of ``bench data``, each in a process of its own: ``python -m bench.data_sides SIDE FILE MODEL SCRATCH``.

``ours`` prepares the rows of FILE as a worker does, from its bytes to a first step. ``raw`` gives the tokenizers library
the same rows, rendered beforehand, and does nothing with what it makes of them.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlora_worker.data.prepare import prepare
from mlora_worker.data.tokenizing.tokenizer import load_tokenizer
from mlora_worker.data.training_rows.row_cache import RowCache
from mlora_worker.data.training_rows.row_files import FolderWriter
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.data.training_rows.token_rows import TokenRows
from mlora_worker.protocol import Dataset, DatasetFields, StorageAccess, Training
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.storage.remote.dataset_source import open_sources

FIELDS = DatasetFields(prompt="question", completion="answer")
TRAINING = Training(max_seq_length=512)
RAW_BATCH = 1000  # rows of one call


class TimedCache(RowCache):
    """Notes when the last row was tokenised."""

    tokenised = 0.0

    @contextmanager
    def writing(self) -> Iterator[FolderWriter]:
        with super().writing() as writer:
            finish = writer.finish

            def noted() -> TokenRows:
                self.tokenised = time.perf_counter()
                return finish()

            writer.finish = noted  # type: ignore[method-assign]
            yield writer


def ours(file: Path, model: Path, scratch: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(model)
    source = open_sources(open_store(StorageAccess(), allow_files=True), StorageAccess())
    dataset = Dataset(uri=file.as_uri(), fields=FIELDS)
    cache = TimedCache(scratch / "rows", "bench")

    def until_first_step() -> float:
        """The moment at which a step's tokens and labels are there."""
        prepared = prepare(dataset, TRAINING, tokenizer, source, TRAINING.max_seq_length, cache=cache)
        steps = StepPlan(len(prepared.rows), TRAINING)
        assert all(len(prepared.rows[row].labels) for row in steps.rows_of_step(1))
        found.update(prepared.counts.model_dump(include={"rows", "used", "tokens"}))
        return time.perf_counter()

    found: dict[str, Any] = {}
    begun = time.perf_counter()
    ready = until_first_step()
    again = time.perf_counter()
    return found | {
        "seconds": ready - begun,
        "start_seconds": ready - cache.tokenised,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "cached_start_seconds": until_first_step() - again,
    }


def raw(file: Path, model: Path, scratch: Path) -> dict[str, Any]:
    del scratch
    tokenizer = load_tokenizer(model)
    rows = [json.loads(line) for line in file.open(encoding="utf-8")]
    texts = tokenizer.apply_chat_template(
        [
            [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            for row in rows
        ],
        tokenize=False,
    )
    backend, tokens = tokenizer.backend_tokenizer, 0
    begun = time.perf_counter()
    for start in range(0, len(texts), RAW_BATCH):
        made = backend.encode_batch(texts[start : start + RAW_BATCH], add_special_tokens=False)
        tokens += sum(map(len, made))
    return {"rows": len(texts), "tokens": tokens, "seconds": time.perf_counter() - begun}


def main(arguments: list[str]) -> None:
    side, file, model, scratch = arguments
    made = {"ours": ours, "raw": raw}[side](Path(file), Path(model), Path(scratch))
    print(json.dumps(made))


if __name__ == "__main__":
    main(sys.argv[1:])
