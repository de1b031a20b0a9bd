"""The base model's tokenizer, from a local folder only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mlora_worker.data.errors import DataError
from mlora_worker.protocol import FailureReason


def load_tokenizer(folder: Path) -> Any:
    """A fast ``PreTrainedTokenizerBase``. Raises DataError (InvalidSpec) when the folder has none.

    Nothing is asked of a hub, and no code of the model's folder is run.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:  # broken files break transformers and tokenizers anywhere, with any error
        raise DataError(
            FailureReason.INVALID_SPEC, f"the base model's folder has no usable tokenizer: {str(error)[:300]}"
        ) from error
    if not tokenizer.is_fast:
        raise DataError(
            FailureReason.INVALID_SPEC,
            "the base model's folder has no tokenizer.json; save its fast tokenizer there",
        )
    return tokenizer
