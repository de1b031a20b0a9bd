"""How large a spec may be as a whole, whatever its fields may be one by one. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

LARGEST_SPEC = (
    512 * 2**10
)  # bytes as JSON in UTF-8 without blanks, defaults filled in; etcd takes 1.5 MiB of an object


def oversized(document: Mapping[str, Any]) -> str | None:
    """What is wrong, and what to do; None for one that is not. ``document``: the JSON of a validated spec."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    size = len(text.encode("utf-8", "surrogatepass"))
    if size <= LARGEST_SPEC:
        return None
    return (
        f"has {size:,} bytes, and may have {LARGEST_SPEC:,}: put rows into a store or a ConfigMap, and name it in place "
        "of what is written out"
    )
