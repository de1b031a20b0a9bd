"""Data sets of a hub that speaks Hugging Face's HTTP protocol, under ``hf://datasets/OWNER/NAME[@REVISION]/PATH``.

A revision is resolved to its commit once, so that all files of a run are of one state. The token goes to the hub alone,
never to where its answers lead on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from mlora_worker.protocol import HUB_ENDPOINT, FailureReason
from mlora_worker.storage.errors import AccessRefused, ObjectNotFound, StorageError, StoreUnreachable
from mlora_worker.storage.web import WebFiles

_ADDRESS = re.compile(r"hf://datasets/([^/@]+)/([^/@]+)(?:@([^/]+))?(?:/(.*))?")
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')
_MOST_PAGES = 100


@dataclass(frozen=True, slots=True)
class HubAddress:
    owner: str
    name: str
    revision: str  # a branch, tag or commit
    path: str  # within the repository; may be empty or a pattern

    def at(self, revision: str, path: str) -> str:
        return f"hf://datasets/{self.owner}/{self.name}@{revision}/{path}"


def hub_address(uri: str) -> HubAddress:
    """Raises StorageError (InvalidSpec)."""
    found = _ADDRESS.fullmatch(uri)
    if found is None:
        raise StorageError(
            FailureReason.INVALID_SPEC,
            f"{uri!r} is no data set of a hub: write hf://datasets/OWNER/NAME or hf://datasets/OWNER/NAME@REVISION/PATH",
        )
    owner, name, revision, path = found.groups()
    return HubAddress(owner, name, revision or "main", (path or "").strip("/"))


class Hub:
    """One hub with one task's token. Thread-safe."""

    def __init__(self, web: WebFiles, token: str | None, endpoint: str = HUB_ENDPOINT) -> None:
        self._web = web
        self._token = token
        self._endpoint = endpoint.rstrip("/")

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def commit(self, at: HubAddress) -> str:
        """The commit that a branch or tag stands for now."""
        answer = self._ask(f"/api/datasets/{at.owner}/{at.name}/revision/{quote(at.revision, safe='')}", at)
        commit = answer.get("sha") if isinstance(answer, dict) else None
        if not isinstance(commit, str) or not commit:
            raise StoreUnreachable(f"{self._endpoint} does not say at which commit {at.owner}/{at.name} is")
        return commit

    def files(self, at: HubAddress, commit: str) -> list[str]:
        """Paths of all files of the data set, sorted."""
        url: str | None = (
            f"{self._endpoint}/api/datasets/{at.owner}/{at.name}/tree/{quote(commit, safe='')}?recursive=true"
        )
        paths: list[str] = []
        for _ in range(_MOST_PAGES):
            data, headers = self._read(str(url), at)
            entries = _json(data, str(url))
            paths += [
                entry["path"]
                for entry in entries
                if isinstance(entry, dict)
                and entry.get("type") == "file"
                and isinstance(entry.get("path"), str)
            ]
            more = _NEXT.search(headers.get("Link", ""))
            url = more.group(1) if more else None
            if url is None or not url.startswith(self._endpoint + "/"):
                break
        return sorted(paths)

    def url(self, uri: str) -> str:
        """Where a file of a data set is read from."""
        at = hub_address(uri)
        revision, path = quote(at.revision, safe=""), quote(at.path)
        return f"{self._endpoint}/datasets/{at.owner}/{at.name}/resolve/{revision}/{path}"

    def _ask(self, path: str, at: HubAddress) -> Any:
        url = self._endpoint + path
        return _json(self._read(url, at)[0], url)

    def _read(self, url: str, at: HubAddress) -> tuple[bytes, Mapping[str, str]]:
        what = f"data set {at.owner}/{at.name}, revision {at.revision}"
        try:
            return self._web.read(url, self.headers)
        except ObjectNotFound:
            raise ObjectNotFound(
                FailureReason.DATASET_NOT_FOUND,
                f"{self._endpoint} has no {what}, or it needs a token: {_TOKEN}",
            ) from None
        except AccessRefused:
            raise AccessRefused(f"{self._endpoint} does not give the {what}: {_TOKEN}") from None


_TOKEN = "put one that may read it as HF_TOKEN into the task's Secret"


def _json(data: bytes, url: str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise StoreUnreachable(f"{url} answered something that is no JSON") from None
