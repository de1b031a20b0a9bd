"""How this worker reads the rows of tasks: from where it may, and where it keeps what it has tokenised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlora_worker.data.training_rows.row_cache import DEFAULT_BYTES, RowCache
from mlora_worker.data.training_rows.row_files import open_rows
from mlora_worker.data.training_rows.token_rows import TokenRows
from mlora_worker.protocol import HUB_ENDPOINT, StorageAccess, WorkerConfig
from mlora_worker.storage.object_store.store import Store
from mlora_worker.storage.remote.dataset_source import DatasetSource, open_sources


@dataclass(frozen=True, slots=True)
class Reading:
    cache_folder: Path | None = None  # None: rows are kept in memory
    cache_bytes: int = DEFAULT_BYTES
    allowed_networks: tuple[str, ...] = ()
    hub_endpoint: str = HUB_ENDPOINT

    def source(self, store: Store, access: StorageAccess) -> DatasetSource:
        """Of one task, whose own store and keys these are."""
        return open_sources(
            store, access, allowed_networks=self.allowed_networks, hub_endpoint=self.hub_endpoint
        )

    def cache(self, namespace: str, opened: Callable[[Path, str], TokenRows] = open_rows) -> RowCache | None:
        """Of one namespace. ``opened``: as in ``RowCache``."""
        if self.cache_folder is None:
            return None
        return RowCache(self.cache_folder, namespace, self.cache_bytes, opened=opened)


def reading_of(config: WorkerConfig) -> Reading:
    return Reading(
        cache_folder=Path(config.cache_dir) / "rows",
        cache_bytes=config.dataset_cache_bytes,
        allowed_networks=config.allowed_networks,
        hub_endpoint=config.hub_endpoint,
    )
