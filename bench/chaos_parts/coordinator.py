"""What a coordinator says, to whoever has its token."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any


def ask(url: str, token: str, seconds: float) -> Mapping[str, Any] | None:
    """The report of the coordinator at ``url``; None when it does not answer in time."""
    request = urllib.request.Request(f"{url}/v1/report", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            found: Mapping[str, Any] = json.loads(answer.read())
            return found
    except (OSError, ValueError):
        return None
