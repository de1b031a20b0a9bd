"""JSON files that stay in stores and on volumes: other versions of this program have written some, and will read others.

Without another ``version``, a field may be added only if a reader that does not know it may pass it over. What such a
reader would get wrong needs another number: it refuses that, and leaves the file where it is.
"""

from __future__ import annotations

import json
from typing import TypeVar

from mlora_worker.protocol import Message

Document = TypeVar("Document", bound=Message)


def read_document(kind: type[Document], data: bytes) -> Document:
    """As ``kind``, without the fields that only later versions know. Raises ValueError."""
    return kind.model_validate_json(data, extra="ignore")


def version_of(data: bytes) -> object:
    """What ``data`` gives as its version, whatever else is in it; None when it is no JSON object, or has none."""
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return plain.get("version") if isinstance(plain, dict) else None
