"""How a command of this machine reaches a store: as a manifest says, with the keys of its Secret or of the machine."""

from __future__ import annotations

from collections.abc import Mapping

from mlora_operator.api.meta import Storage
from mlora_operator.reconcile.state.references import HUB_TOKEN, access_with
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
    held = dict(keys or {})
    if not held.get(HUB_TOKEN, "").strip():
        held[HUB_TOKEN] = environment.get(HUB_TOKEN, "")
    return access_with(storage.model_copy(update={"endpoint": endpoint or storage.endpoint}), held)
