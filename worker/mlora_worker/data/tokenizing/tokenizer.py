"""The base model's tokenizer, from a local folder only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mlora_worker.data.errors import DataError
from mlora_worker.protocol import FailureReason
from mlora_worker.storage.versioned_json import plain_json

_PROCESSORS_TEMPLATE = "chat_template.json"


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
    if not tokenizer.chat_template:
        tokenizer.chat_template = _processors_template(folder)
    return tokenizer


def _processors_template(folder: Path) -> str | None:
    """Models that also read images may have it in a file of their processor alone, which tokenizers do not read. Raises
    DataError where that file is damaged."""
    try:
        template = plain_json((folder / _PROCESSORS_TEMPLATE).read_bytes())["chat_template"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        template = None
    if not isinstance(template, str):
        raise DataError(
            FailureReason.INVALID_SPEC,
            f"{_PROCESSORS_TEMPLATE} in the base model's folder has no chat_template: correct it, or remove the file",
        )
    return template
