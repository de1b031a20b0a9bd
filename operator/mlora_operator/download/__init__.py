"""A finished adapter from its store to a folder: manifest first, files verified, whole or not at all.

``source`` reads a store, ``manifest`` says what is to come, ``waiting`` waits for it, ``partial`` keeps what a
broken-off download has got, ``files`` fetches and verifies, ``swap`` puts it in place. Nothing but the standard
library and boto3 is imported here, so that an adapter can be fetched where nothing else is installed.
"""

from mlora_operator.download.errors import (
    AdapterCorrupt,
    AdapterNotFound,
    DownloadError,
    FolderInUse,
    StoreRefused,
    StoreSilent,
)
from mlora_operator.download.files import download
from mlora_operator.download.manifest import AdapterFile, Manifest, read_manifest
from mlora_operator.download.source import Access, AdapterFolders, AdapterSource, open_source
from mlora_operator.download.waiting import await_manifest

__all__ = [
    "Access",
    "AdapterCorrupt",
    "AdapterFile",
    "AdapterFolders",
    "AdapterNotFound",
    "AdapterSource",
    "DownloadError",
    "FolderInUse",
    "Manifest",
    "StoreRefused",
    "StoreSilent",
    "await_manifest",
    "download",
    "open_source",
    "read_manifest",
]
