"""A stranger who reads the bucket all the time: where a manifest is, an adapter has to be."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any

from botocore.exceptions import ClientError

from mlora_worker.protocol import MANIFEST_NAME


class Reader:
    """Lists ``bucket`` until ``stop``; what it must never see is in ``half_written``. Goes to the store directly."""

    def __init__(self, client: Any, bucket: str, every: float = 0.25) -> None:
        self._client, self._bucket, self._every = client, bucket, every
        self._stop = threading.Event()
        self._seen: dict[str, str] = {}  # manifest -> the ETag with which all was well
        self.half_written: list[str] = []
        self.looks = 0
        self.vanished: list[str] = []  # manifests that were there, and then were not
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    @property
    def whole(self) -> set[str]:
        """Prefixes of all adapters that it has seen whole."""
        return {key.removesuffix(f"/{MANIFEST_NAME}") for key in self._seen}

    def stop(self) -> None:
        """After one more look."""
        self.close()
        self._look()

    def close(self) -> None:
        """Without a further look."""
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._look()

    def _look(self) -> None:
        self.looks += 1
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket)
        found = {entry["Key"]: entry["ETag"] for page in pages for entry in page.get("Contents", ())}
        manifests = {
            key: tag
            for key, tag in found.items()
            if key.endswith(f"/{MANIFEST_NAME}") and "/checkpoints/" not in key
        }
        self.vanished += [key for key in self._seen if key not in manifests and key not in self.vanished]
        for key, tag in manifests.items():
            if self._seen.get(key) == tag:
                continue
            flaw = self._flaw(key)
            if flaw is None:
                self._seen[key] = tag
            elif self._read(key) is not None:  # it is still presented as done
                self.half_written.append(f"{key}: {flaw}")

    def _flaw(self, key: str) -> str | None:
        text = self._read(key)
        if text is None:
            return "gone"
        for file in json.loads(text)["files"]:
            data = self._read(key.replace(MANIFEST_NAME, file["name"]))
            if data is None:
                return f"{file['name']} is missing"
            if hashlib.sha256(data).hexdigest() != file["sha256"]:
                return f"{file['name']} is not what the manifest says"
        return None

    def _read(self, key: str) -> bytes | None:
        try:
            data: bytes = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                return None
            raise
        return data
