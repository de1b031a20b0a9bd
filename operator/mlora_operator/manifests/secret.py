"""The Secret with the bearer token of a pipeline's coordinator. Pure."""

from __future__ import annotations

import base64
from typing import Any

from mlora_operator.manifests.owner import Owner, metadata

TOKEN_KEY = "token"


def token_secret(owner: Owner, token: str) -> dict[str, Any]:
    """Made once and never changed, so that a second operator pass cannot lock the first one out."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(owner, owner.token_secret),
        "type": "Opaque",
        "immutable": True,
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }
