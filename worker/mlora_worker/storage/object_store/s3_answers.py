"""What a store answers, before the SDK reads it: lists and refusals are read whole there, whatever their length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)
from botocore.exceptions import ConnectionClosedError, HTTPClientError
from urllib3.exceptions import HTTPError

from mlora_worker.storage.wire import BadAnswer, watched

_PIECE: Final = 2**16
_LARGEST_REFUSAL: Final = 2**18  # bytes of an error's own words
_LARGEST_DOCUMENT: Final = (
    16 * 2**20
)  # bytes of anything else but an object: a list of a thousand names has less than half


class _Pool(AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = watched(AWSHTTPConnection)


class _TlsPool(AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = watched(AWSHTTPSConnection)


def watch_answers(client: Any) -> None:
    """From now on, what the ``client`` is asked raises BadAnswer for a store that answers without end, or hardly at all. Of
    an object, only its pace is watched: whoever reads it counts."""
    session = client._endpoint.http_session
    # Its connections are made by these, also through a proxy; it has no other way to name them.
    session._pool_classes_by_scheme.update(http=_Pool, https=_TlsPool)

    def send(request: Any, **_: Any) -> Any:
        whole, request.stream_output = not request.stream_output, True
        try:
            answer = session.send(request)
            refused = answer.status_code >= 300
            if whole or refused:
                answer.raw = _Counted(answer.raw, _LARGEST_REFUSAL if refused else _LARGEST_DOCUMENT)
                _ = answer.content  # it stays with the answer
        except HTTPClientError as error:
            cause = error.kwargs.get("error")  # the SDK takes what it does not know for a failed connection
            if isinstance(cause, BadAnswer):
                raise cause from None
            raise
        except HTTPError as error:  # in the words that the SDK tries again for
            raise ConnectionClosedError(error=error, request=request, endpoint_url=request.url) from error
        return answer

    client.meta.events.register("before-send.s3", send)


class _Counted:
    """The SDK's view of a body: of at most ``most`` bytes. Raises BadAnswer."""

    def __init__(self, raw: Any, most: int) -> None:
        self._raw, self._left = raw, most

    def stream(self) -> Iterator[bytes]:
        while piece := self.read(_PIECE):
            yield piece

    def read(self, amount: int = _PIECE) -> bytes:
        piece: bytes = self._raw.read(amount)
        self._left -= len(piece)
        if self._left < 0:
            self._raw.close()
            raise BadAnswer("sent a response that does not end")
        return piece

    def close(self) -> None:
        self._raw.close()
