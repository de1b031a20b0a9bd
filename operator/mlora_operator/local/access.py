"""How a command of this machine reaches a store: as a manifest says, with the keys of its Secret or of the machine."""

from __future__ import annotations

from collections.abc import Mapping

from mlora_operator.api.meta import Storage
from mlora_operator.reconcile.accept import ACCESS_KEY, CA_CERTIFICATE, HUB_TOKEN, SECRET_KEY, SESSION_TOKEN
from mlora_worker.protocol import StorageAccess


def access_to(
    storage: Storage,
    keys: Mapping[str, str] | None,
    environment: Mapping[str, str],
    endpoint: str | None = None,
) -> StorageAccess:
    """``keys``: what the Secret holds; without any, a worker process takes the identity that the environment gives.
    ``endpoint`` instead of that of ``storage``. A hub's token may be in the environment, too.
    """
    held = {name: value.strip() for name, value in (keys or {}).items()}
    return StorageAccess.model_validate(
        {
            "endpoint": endpoint or storage.endpoint,
            "region": storage.region,
            "addressing": storage.addressing,
            "checksums": storage.checksums,
            "caCertificate": held.get(CA_CERTIFICATE) or None,
            "accessKey": held.get(ACCESS_KEY) or None,
            "secretKey": held.get(SECRET_KEY) or None,
            "sessionToken": held.get(SESSION_TOKEN) or None,
            "hubToken": held.get(HUB_TOKEN) or environment.get(HUB_TOKEN, "").strip() or None,
        }
    )
