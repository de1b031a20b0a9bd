"""The Secret with the bearer token of a pipeline's coordinator. Pure."""

from __future__ import annotations

import base64
from typing import Any

from mlora_operator.manifests.owner import Owner, metadata

TOKEN_KEY = "token"


def token_secret(owner: Owner, token: str) -> dict[str, Any]:
    """Made once, when there is none. Not immutable: of such a Secret the kubelet keeps the first one for ever, but one that
    was deleted, and so made anew with another token, shall reach the workers that run.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(owner, owner.token_secret),
        "type": "Opaque",
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }
