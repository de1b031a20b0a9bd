"""Repositories of a hub that speaks Hugging Face's HTTP protocol: data sets under
``hf://datasets/OWNER/NAME[@REVISION]/PATH``, models under ``hf://OWNER/NAME``.

A revision is resolved to its commit once, so that all files of a run are of one state. The token goes to the hub alone,
never to where its answers lead on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import quote

from mlora_worker import addresses
from mlora_worker.protocol import HUB_ENDPOINT, FailureReason
from mlora_worker.storage.errors import AccessRefused, ObjectNotFound, StorageError, UselessAnswer
from mlora_worker.storage.limits import LARGEST_OBJECT, MOST_LISTED, Listing, Oversized
from mlora_worker.storage.remote.http import WebFiles
from mlora_worker.storage.versioned_json import plain_json

_NEXT = re.compile(r'<([^<>]{1,4096})>;\s{0,16}rel="next"')
_COMMIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_PAGES = 100
_LARGEST_PAGE = 8 * 2**20  # bytes of one page of a list of files


@dataclass(frozen=True, slots=True)
class RepositoryPath:
    owner: str
    name: str
    revision: str  # a branch, tag or commit
    path: str  # within the repository; may be empty or a pattern
    kind: Literal["datasets", "models"] = "datasets"

    def at(self, revision: str, path: str) -> str:
        return f"hf://datasets/{self.owner}/{self.name}@{revision}/{path}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """What a hub says of a file of one commit."""

    path: str
    size: int | None = None
    sha256: str | None = None  # of large files
    git_blob: str | None = None  # SHA-1 of the others, as git reckons it


def hub_address(uri: str) -> RepositoryPath:
    """Of a data set. Raises StorageError (InvalidSpec)."""
    try:
        found = addresses.hub_data(uri)
    except addresses.NotAnAddress as error:
        raise StorageError(FailureReason.INVALID_SPEC, str(error)) from None
    return RepositoryPath(found.owner, found.name, found.revision or "main", found.path)


def model_address(uri: str, revision: str | None) -> RepositoryPath:
    """Of a model, or of a folder in its repository. Raises StorageError (InvalidSpec)."""
    try:
        found = addresses.hub_model(uri)
    except addresses.NotAnAddress as error:
        raise StorageError(FailureReason.INVALID_SPEC, str(error)) from None
    if found.owner == "datasets":
        raise StorageError(
            FailureReason.INVALID_SPEC,
            f"{uri!r} is a data set: write hf://OWNER/NAME, and put a revision into model.revision",
        )
    return RepositoryPath(found.owner, found.name, revision or "main", found.path, "models")


class HubClient:
    """One hub with one token. Thread-safe. ``where``: of the Secret that a token belongs into, for messages."""

    def __init__(
        self,
        web: WebFiles,
        token: str | None,
        endpoint: str = HUB_ENDPOINT,
        where: str = "the task's Secret",
    ) -> None:
        self._web = web
        self._token = token
        self.endpoint = endpoint.strip().rstrip("/")
        self._advice = f"put a token that can read it as HF_TOKEN into {where}"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def commit(self, at: RepositoryPath) -> str:
        """The commit that a branch or tag stands for now."""
        answer = self._ask(f"{_api(at)}/revision/{quote(at.revision, safe='')}", at)
        commit = answer.get("sha") if isinstance(answer, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise UselessAnswer(f"{self.endpoint} does not report the commit of {at.owner}/{at.name} is")
        return commit

    def files(self, at: RepositoryPath, commit: str) -> list[str]:
        """Paths of all files of the repository, sorted."""
        return [file.path for file in self.entries(at, commit)]

    def entries(self, at: RepositoryPath, commit: str) -> list[HubFile]:
        """All files of the repository, by path."""
        url: str | None = f"{self.endpoint}{_api(at)}/tree/{quote(commit, safe='')}?recursive=true"
        found: list[HubFile] = []
        listing = Listing(MOST_LISTED)
        for _ in range(_MOST_PAGES):
            data, headers = self._read(str(url), at)
            for entry in _entries_of(_json(data, str(url))):
                try:
                    listing.add(entry["path"])
                except Oversized as error:
                    raise UselessAnswer(f"the list of files of {at.owner}/{at.name} {error}") from None
                found.append(_file(entry))
            more = _NEXT.search(headers.get("Link", ""))
            if more is None:
                return sorted(found, key=lambda file: file.path)
            url = self._next(str(url), more.group(1))
        raise UselessAnswer(f"{self.endpoint} does not end its list of files after {_MOST_PAGES} pages")

    def _next(self, url: str, link: str) -> str:
        """Raises UselessAnswer where it is not the hub's own: its token goes with each page that is asked for."""
        own = addresses.endpoint(self.endpoint)
        try:
            then = addresses.led_to(url, link)
            there = addresses.web(then)
        except addresses.NotAnAddress:
            raise UselessAnswer(f"{url} continues at an invalid address") from None
        if there.origin != own.origin or not there.path.startswith(f"{own.path}/"):
            raise UselessAnswer(
                f"{self.endpoint} continues its list of files at another host ({there.host}): "
                "set that host as the hub's endpoint"
            )
        return then

    def url(self, uri: str) -> str:
        """Where a file of a data set is read from."""
        return self.url_of(hub_address(uri))

    def url_of(self, at: RepositoryPath) -> str:
        kind = "" if at.kind == "models" else f"/{at.kind}"
        revision, path = quote(at.revision, safe=""), quote(at.path)
        return f"{self.endpoint}{kind}/{at.owner}/{at.name}/resolve/{revision}/{path}"

    def _ask(self, path: str, at: RepositoryPath) -> Any:
        url = self.endpoint + path
        return _json(self._read(url, at)[0], url)

    def _read(self, url: str, at: RepositoryPath) -> tuple[bytes, Mapping[str, str]]:
        kind = "model" if at.kind == "models" else "data set"
        what = f"{kind} {at.owner}/{at.name}, revision {at.revision}"
        try:
            return self._web.read(url, self.headers, most=_LARGEST_PAGE)
        except ObjectNotFound:
            raise ObjectNotFound(
                FailureReason.DATASET_NOT_FOUND if at.kind == "datasets" else FailureReason.INVALID_SPEC,
                f"{self.endpoint} has no {what}, or it needs a token: {self._advice}",
            ) from None
        except AccessRefused:
            raise AccessRefused(f"{self.endpoint} denies access to the {what}: {self._advice}") from None


def _api(at: RepositoryPath) -> str:
    return f"/api/{at.kind}/{at.owner}/{at.name}"


def _entries_of(page: Any) -> Iterator[dict[str, Any]]:
    for entry in page if isinstance(page, list) else ():
        if isinstance(entry, dict) and entry.get("type") == "file" and isinstance(entry.get("path"), str):
            yield entry


def _size(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value <= LARGEST_OBJECT else None


def _file(entry: dict[str, Any]) -> HubFile:
    blob, large = entry.get("oid"), entry.get("lfs")
    file = HubFile(entry["path"], _size(entry.get("size")))
    if isinstance(large, dict):
        digest = str(large.get("oid", "")).removeprefix("sha256:")
        whole = _size(large.get("size"))
        return replace(
            file,
            size=whole if whole is not None else file.size,
            sha256=digest if _SHA256.fullmatch(digest) else None,
        )
    return replace(file, git_blob=blob if isinstance(blob, str) and len(blob) == 40 else None)


def _json(data: bytes, url: str) -> Any:
    try:
        return plain_json(data)
    except ValueError:
        raise UselessAnswer(f"{url} did not answer with JSON") from None
