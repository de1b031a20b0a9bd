"""An S3 store on the loopback address that takes its time: objects lie in a folder, bodies come and go at a set pace."""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from pydantic import SecretStr

from mlora_worker.protocol import StorageAccess
from tests.fixtures.served import Answering, served

_PIECE = 256 * 2**10


class SlowStore(ThreadingHTTPServer):
    """``pace``: bytes a second of each body; may be changed at any time."""

    daemon_threads = True

    def __init__(self, folder: Path, pace: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.pace = folder, pace
        self.numbers = itertools.count(1)  # of uploads and of files in writing
        (folder / "objects").mkdir(parents=True)
        (folder / "writing").mkdir()

    @property
    def access(self) -> StorageAccess:
        return StorageAccess(
            endpoint=f"http://127.0.0.1:{self.server_address[1]}",
            access_key=SecretStr("anybody"),
            secret_key=SecretStr("anything"),
        )

    def wait(self, size: int) -> None:
        time.sleep(size / self.pace)


@contextmanager
def slow_store(folder: Path, pace: float) -> Iterator[SlowStore]:
    """A store that runs within the block."""
    with served(SlowStore(folder, pace)) as server:
        yield server


class _Handler(Answering):
    protocol_version = "HTTP/1.1"
    server: SlowStore

    def log_message(self, *_: object) -> None: ...

    def _handle(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        path = self.server.folder / "objects" / unquote(url.path).strip("/").replace("/", "%")
        upload = self.server.folder / f"upload-{query.get('uploadId', '')}"
        match self.command, "uploads" in query, "uploadId" in query:
            case "POST", True, _:
                number = str(next(self.server.numbers))
                (self.server.folder / f"upload-{number}").mkdir()
                result = "InitiateMultipartUploadResult"
                self.answer(200, f"<{result}><UploadId>{number}</UploadId></{result}>".encode())
            case "POST", _, True:
                for _ in self._body():
                    pass
                self._join(upload, path)
            case "PUT", _, True:
                self._take(upload / query["partNumber"].zfill(6))
            case "DELETE", _, True:
                shutil.rmtree(upload, ignore_errors=True)
                self.answer(204)
            case "PUT", _, _:
                self._take(path)
            case "DELETE", _, _:
                path.unlink(missing_ok=True)
                self.answer(204)
            case "GET", True, _:
                self.answer(200, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")
            case "GET", _, _ if "list-type" in query:
                self._list(unquote(url.path).strip("/"), query.get("prefix", ""))
            case _:
                self._send(path)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def _body(self) -> Iterator[bytes]:
        left = int(self.headers.get("Content-Length") or 0)
        while left > 0:
            piece = self.rfile.read(min(left, _PIECE))
            left -= len(piece)
            self.server.wait(len(piece))
            yield piece

    def _take(self, path: Path) -> None:
        digest = hashlib.md5(usedforsecurity=False)
        writing = self.server.folder / "writing" / str(next(self.server.numbers))
        with writing.open("wb") as file:
            for piece in self._body():
                digest.update(piece)
                file.write(piece)
        with suppress(FileNotFoundError):  # the upload was aborted meanwhile
            writing.rename(path)
        self.answer(200, ETag=f'"{digest.hexdigest()}"')

    def _join(self, upload: Path, path: Path) -> None:
        with path.open("wb") as file:
            for part in sorted(upload.iterdir()):
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)
        shutil.rmtree(upload, ignore_errors=True)
        self.answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")

    def _list(self, bucket: str, prefix: str) -> None:
        names = sorted(one.name.replace("%", "/") for one in (self.server.folder / "objects").iterdir())
        keys = [name.removeprefix(f"{bucket}/") for name in names if name.startswith(f"{bucket}/{prefix}")]
        made = "".join(f"<Contents><Key>{escape(quote(key))}</Key><Size>1</Size></Contents>" for key in keys)
        encoded = "<EncodingType>url</EncodingType>"
        text = f"<ListBucketResult>{encoded}<IsTruncated>false</IsTruncated>{made}</ListBucketResult>"
        self.answer(200, text.encode())

    def _send(self, path: Path) -> None:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        with file:
            size = path.stat().st_size
            first, last, status = 0, size - 1, 200
            if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                first, last, status = int(found[1]), min(int(found[2]), size - 1), 206
            self.send_response(status)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("ETag", '"x"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.end_headers()
            if self.command == "HEAD":
                return
            file.seek(first)
            left = last - first + 1
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                left -= len(piece)
                self.server.wait(len(piece))
                self.wfile.write(piece)
