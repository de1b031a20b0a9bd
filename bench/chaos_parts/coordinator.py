"""What a coordinator says, to whoever has its token."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any


def ask(url: str, token: str, seconds: float, certificate: str | None = None) -> Mapping[str, Any] | None:
    """The report of the coordinator at ``url``; None when it does not answer in time. ``certificate``: that it has to have,
    whatever its address, where it serves HTTPS."""
    request = urllib.request.Request(f"{url}/v1/report", headers={"Authorization": f"Bearer {token}"})
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cadata=certificate)
    try:
        with urllib.request.urlopen(request, timeout=seconds, context=context) as answer:
            found: Mapping[str, Any] = json.loads(answer.read())
            return found
    except (OSError, ValueError):
        return None
