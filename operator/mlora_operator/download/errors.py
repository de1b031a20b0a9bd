"""What may go wrong when an adapter is fetched. Each kind has its own exit code in ``mlora fetch``."""

from __future__ import annotations


class DownloadError(Exception):
    """Root of all kinds below."""


class AdapterNotFound(DownloadError):
    """There is no manifest: nothing was finished there."""


class StoreRefused(DownloadError):
    """The store refuses the keys or the request; asking again would not help."""


class StoreSilent(DownloadError):
    """The store does not answer, or says that it cannot just now; asking again may help."""


class AdapterCorrupt(DownloadError):
    """The files are not what the manifest says, or the manifest is none."""


class FolderInUse(DownloadError):
    """The target folder cannot be had: it holds something else, or cannot be written."""
