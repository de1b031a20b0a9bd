"""Waiting for an adapter that is still being trained."""

from __future__ import annotations

from collections.abc import Callable

from mlora_operator.download.errors import AdapterNotFound, DownloadError, StoreSilent
from mlora_operator.download.manifest import Manifest, read_manifest
from mlora_operator.download.source import AdapterSource

_LONGEST_PAUSE = 15.0


def await_manifest(
    source: AdapterSource,
    wanted: Callable[[Manifest], bool],
    seconds: float | None,
    now: Callable[[], float],
    pause: Callable[[float], None],
) -> Manifest:
    """The first manifest there that is ``wanted``; asks again, at first each second, then every 15 seconds.

    A store that does not answer is asked again, too; a refusal ends the wait. ``seconds`` None: for ever.
    Raises TimeoutError with what was seen last, StoreRefused, AdapterCorrupt.
    """
    end = None if seconds is None else now() + seconds
    wait = 1.0
    while True:
        try:
            manifest = read_manifest(source)
            if wanted(manifest):
                return manifest
            seen: DownloadError = AdapterNotFound(
                f"the adapter there belongs to another task: {manifest.namespace}/{manifest.name}"
            )
        except (AdapterNotFound, StoreSilent) as error:
            seen = error
        left = wait if end is None else end - now()
        if left <= 0:
            raise TimeoutError(str(seen))
        pause(min(wait, left))
        wait = min(wait * 1.5, _LONGEST_PAUSE)
