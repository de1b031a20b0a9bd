"""Asked before training: can the adapter be written where it shall go?"""

from __future__ import annotations

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import ObjectNotFound, StorageError
from mlora_worker.storage.object_store.store import Store
from mlora_worker.storage.uri import join

PROBE_NAME = ".mlora-write-probe"
_CONTENT = b"Written before training to prove that the adapter can be stored here; safe to delete.\n"


def probe_output(store: Store, output_uri: str) -> None:
    """Puts, heads and deletes a small object below ``output_uri``. Raises StorageError; a missing bucket is
    UploadFailed.
    """
    uri = join(output_uri, PROBE_NAME)
    try:
        store.write(uri, _CONTENT)
        size = store.size(uri)
        store.delete(uri)
    except ObjectNotFound as error:
        raise StorageError(FailureReason.UPLOAD_FAILED, str(error)) from None
    if size != len(_CONTENT):
        raise StorageError(
            FailureReason.UPLOAD_FAILED,
            f"{uri}: wrote {len(_CONTENT)} bytes, but the store has {size}; its responses are not reliable",
        )
