"""The Secrets of a pipeline's coordinator: its bearer token, and the certificate that it proves itself by. Pure."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

from mlora_operator.manifests.owner import Owner, metadata

TOKEN_KEY = "token"
CERTIFICATE_KEY, PRIVATE_KEY = "tls.crt", "tls.key"  # names that the type of Secret asks for


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """A certificate and its private key, as PEM."""

    certificate: str
    key: str = field(repr=False)


def token_secret(owner: Owner, token: str) -> dict[str, Any]:
    """Made once, when there is none. Not immutable: of such a Secret the kubelet keeps the first one for ever, but one that
    was deleted, and so made anew with another token, shall reach the workers that run.
    """
    return _secret(owner, owner.token_secret, "Opaque", {TOKEN_KEY: token})


def tls_secret(owner: Owner, pair: CertificatePair) -> dict[str, Any]:
    """Made once, when there is none, and not immutable, as the token. A Secret of its own: to add something to the token's,
    which a former operator made, would need the right to change Secrets.
    """
    data = {CERTIFICATE_KEY: pair.certificate, PRIVATE_KEY: pair.key}
    return _secret(owner, owner.tls_secret, "kubernetes.io/tls", data)


def _secret(owner: Owner, name: str, type_: str, data: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(owner, name),
        "type": type_,
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in data.items()},
    }
